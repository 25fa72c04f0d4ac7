// The credit of two rules on the same answers, and their difference. Nothing is trained here.

const RULES = { // label, and what differs from the settings of the paper
  run: ['the run', null],
  GRPO: ['GRPO, DAPO', {}],
  'GRPO-S': ['GRPO-S', {}],
  GTPO: ['GTPO', {}],
  dew: ['dew', { alpha1: 0.5, alpha2: 0.5, pool: 'outcome' }],
};

/** The rules that can be shown for a group: without entropies only its own and GRPO. */
function rulesOf(group) {
  const rules = hasEntropy(group) ? Object.keys(RULES) : ['run', 'GRPO'];
  return group.answers.some((answer) => answer.advantage) ? rules : rules.slice(1);
}

/** A rule's own settings; of the run's rule, those of the run. */
function ruleSettings(group, rule) {
  const own = methodOf(group) && group.algorithm === 'dew' ? 'dew' : methodOf(group);
  return rule === own ? settingsOf(group) : { ...PAPER, ...RULES[rule][1] };
}

const creditOf = (group, rule, settings) =>
  rule === 'run'
    ? group.answers.map(({ advantage, tokens }) => advantage || tokens.map(() => null))
    : advantages(group, rule === 'dew' ? 'GTPO' : rule, settings);

/** The two rules that are compared: chosen, else the run's and GRPO; the first has the settings on the page. */
function comparedRules(group) {
  const rules = rulesOf(group);
  const first = rules.includes(state.rule) ? state.rule : rules[0];
  const second = rules.includes(state.than) ? state.than : 'GRPO';
  return [first, second, { ...ruleSettings(group, first), ...view.what }];
}

function takeDifference(group) {
  const [first, second, settings] = comparedRules(group);
  const [one, two] = [creditOf(group, first, settings), creditOf(group, second, ruleSettings(group, second))];
  group.answers.forEach((answer, i) => {
    const differ = (v, t) => (isKnown(v) && isKnown(two[i][t]) ? v - two[i][t] : null);
    Object.assign(answer, { first: one[i], second: two[i], difference: one[i].map(differ) });
  });
}

/** The credit of one token with both rules. */
function comparedTable(group, { first, second, difference }, t) {
  const names = [...comparedRules(group).slice(0, 2).map((rule) => RULES[rule][0]), 'difference'];
  return table('signals', null, [first, second, difference].map((values, k) => [names[k], number(values[t])]));
}

/** The controls of the first rule's settings; each recomputes. */
function ruleControls(rule, settings, redraw) {
  if (rule === 'run' || rule === 'GRPO') return null;
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
    slider('alpha1', rule === 'GRPO-S' ? 'β₁' : 'α₁'),
    slider('alpha2', rule === 'GRPO-S' ? 'β₂' : 'α₂'),
    rule !== 'GRPO-S' && options('Compare', 'compare', places),
    options('Average', 'average', { arithmetic: 'arithmetic', geometric: 'geometric' }),
    options('Pool', 'pool', { group: 'group', joint: 'joint', sign: 'sign', outcome: 'outcome (keeps signs)' }),
    options('Spread', 'spread', { both: 'both outcomes', correct: 'correct only', wrong: 'wrong only' }),
  );
}

/** The choice of two rules, the settings of the first, and the scale of their difference. */
function compareControls(group) {
  const [first, second, settings] = comparedRules(group);
  const note = `Credit with ${RULES[first][0]} − credit with ${RULES[second][0]}`;
  const scale = h('div', legend(view.scale, note, view.place.head));
  const redraw = () => {
    takeDifference(group);
    view.scale = scaleOf(group);
    refill(scale, legend(view.scale, note, view.place.head));
    drawVisible();
    if (view.pinned) tell(view.pinned);
  };
  const rules = rulesOf(group).map((rule) => [rule, RULES[rule][0]]);
  const rulesChoice = (label, name, value) =>
    choice(label, rules, value, (chosen) => {
      view.what = null;
      setting(name, showGroup)(chosen);
    });
  return [
    h('div.controls', rulesChoice('Credit with', 'rule', first), rulesChoice('minus', 'than', second)),
    ruleControls(first, settings, redraw),
    scale,
    !hasSignal(group) && h('p.calm', 'All answers have the same outcome: no rule learns from this group.'),
  ];
}
