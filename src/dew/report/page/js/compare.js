// The credit of two rules on the same answers, and their difference. Nothing is trained here.

/** The rules that can be shown for a group, its own credit first: {key, label, method?, settings?, n?}. */
function rulesOf(group) {
  const all = view.report.rules.map((rule, n) => ({ ...rule, n, key: rule.label.split(', ')[0] }));
  const shown = all.filter(({ method, n }) => (method ? method === 'GRPO' || hasEntropy(group) : group.rules[n]));
  const own = group.answers.some((answer) => answer.advantage) ? [{ key: 'run', label: 'the run' }] : [];
  return own.concat(shown);
}

/** Credit as recorded, by the formulas of this page, or as Python has computed it. */
function creditOf(group, { method, n }, settings) {
  if (method) return advantages(group, method, settings);
  return group.answers.map(({ advantage, tokens }, i) => perToken(isKnown(n) ? group.rules[n][i] : advantage, tokens));
}

/** The two rules that are compared: chosen, else the run's and GRPO; the first has the settings on the page. */
function comparedRules(group) {
  const rules = rulesOf(group);
  const named = (name) => rules.find(({ key }) => key === name);
  const first = named(state.rule) || rules[0];
  const second = named(state.than) || rules.find(({ method }) => method === 'GRPO') || rules[0];
  return [first, second, { ...settingsOf(first), ...view.what }];
}

function takeDifference(group) {
  const [first, second, settings] = comparedRules(group);
  const [one, two] = [creditOf(group, first, settings), creditOf(group, second, settingsOf(second))];
  group.answers.forEach((answer, i) => {
    const differ = (v, t) => (isKnown(v) && isKnown(two[i][t]) ? v - two[i][t] : null);
    Object.assign(answer, { first: one[i], second: two[i], difference: one[i].map(differ) });
  });
}

/** The credit of one token with both rules. */
function comparedTable(group, { first, second, difference }, t) {
  const names = [...comparedRules(group).slice(0, 2).map(({ key }) => key), 'difference'];
  return table('signals', null, [first, second, difference].map((values, k) => [names[k], number(values[t])]));
}

/** The controls of the first rule's settings; each recomputes. */
function ruleControls({ method }, settings, redraw) {
  if (!method || method === 'GRPO') return null;
  const use = (name, value) => {
    view.what = { ...view.what, [name]: value };
    redraw();
  };
  const slider = (name, label) => {
    const shown = h('output', number(settings[name]));
    const oninput = ({ target: { value } }) => {
      shown.textContent = number(Number(value));
      use(name, Number(value));
    };
    const look = { type: 'range', min: 0, max: 2, step: 0.05, value: settings[name], 'data-setting': name };
    return labelled(label, [h('input', { ...look, oninput }), shown]);
  };
  const options = (label, name, values) => choice(label, values, settings[name], (value) => use(name, value));
  const places = { column: 'same position', row: 'same answer', matrix: 'all tokens', turn: 'same turn' };
  return h('div.controls',
    slider('alpha1', method === 'GRPO-S' ? 'β₁' : 'α₁'),
    slider('alpha2', method === 'GRPO-S' ? 'β₂' : 'α₂'),
    method !== 'GRPO-S' && options('Compare', 'compare', places),
    options('Average', 'average', { arithmetic: 'arithmetic', geometric: 'geometric' }),
    options('Pool', 'pool', { group: 'group', joint: 'joint', sign: 'sign', outcome: 'outcome (keeps signs)' }),
    options('Spread', 'spread', { both: 'both outcomes', correct: 'correct only', wrong: 'wrong only' }),
  );
}

/** The choice of two rules, the settings of the first, and the scale of their difference. */
function compareControls(group) {
  const [first, second, settings] = comparedRules(group);
  const note = `Credit with ${first.key} − credit with ${second.key}`;
  const isBatch = [first, second].some(({ method, n }) => !method && isKnown(n));
  const scale = h('div', legend(view.scale, note, view.place.head));
  const redraw = () => {
    takeDifference(group);
    view.scale = scaleOf(group);
    refill(scale, legend(view.scale, note, view.place.head));
    drawVisible();
    if (view.pinned) tell(view.pinned);
  };
  const rules = rulesOf(group).map(({ key, label }) => [key, visible(label.replace(/^((\S+ ){3}).*/, '$1…'))]);
  const rulesChoice = (label, name, { key }) =>
    choice(label, rules, key, (chosen) => {
      view.what = null;
      setting(name, showGroup)(chosen);
    });
  return [
    h('div.controls', rulesChoice('Credit with', 'rule', first), rulesChoice('minus', 'than', second)),
    ruleControls(first, settings, redraw),
    scale,
    isBatch && h('p.quiet', 'A rule that reads the whole batch is given the recorded groups of this step.'),
    !hasSignal(group) && h('p.calm', 'All answers have the same outcome: no rule learns from this group.'),
  ];
}
