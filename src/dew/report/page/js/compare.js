// The same answers under GRPO, GRPO-S and GTPO, recomputed from the recorded entropies. No training happens here.

function methodBlock(group, i, method, m, table, scale) {
  const spans = group.answers[i].tokens.slice(0, FIRST_TOKENS).map((token, t) => {
    const v = table[i][t];
    const span = tokenSpan(token, t);
    if (v === null) span.dataset.hue = 'dead';
    else paint(span, scale.of(m, v, i));
    span.title = number(v);
    return span;
  });
  const values = known(table[i]).sort((a, b) => a - b);
  const [low, high] = [values[0], values.at(-1)];
  const range = high - low > 1e-6 ? `A from ${number(low)} to ${number(high)}` : `A = ${number(low)} everywhere`;
  const title = h('div.method-name', h('strong', method), quiet(range));
  return h('div.method', { 'data-i': i, 'data-method': method }, title, h('div.tokens', spans));
}

function comparedRow(group, correct, tables, scale) {
  const same = [...group.answers.keys()].filter((k) => group.answers[k].correct === correct);
  if (!same.length) return null;
  const i = view.compared[correct] ?? same[0];
  const options = same.map((k) => [String(k), `#${k + 1}`]);
  const pick = (k) => {
    view.compared[correct] = Number(k);
    showGroup();
  };
  const blocks = METHODS.map((method, m) => methodBlock(group, i, method, m, tables[m], scale));
  const header = h('header', outcome(group.answers[i]), choice('Answer', options, String(i), pick));
  return h(`section.compared.${sideClass(correct)}`, header, h('div.methods', blocks));
}

function compareControls(settings) {
  const use = (chosen) => {
    view.what = chosen;
    showGroup();
  };
  const weight = (name, label) => {
    const onchange = ({ target: { value } }) =>
      value !== '' && Number(value) >= 0 && use({ ...settings, [name]: Number(value) });
    const look = { type: 'number', min: 0, max: 10, step: 0.1, value: settings[name], 'data-setting': name };
    return labelled(label, h('input', { ...look, onchange }));
  };
  const options = (label, name, values) =>
    choice(label, values, settings[name], (value) => use({ ...settings, [name]: value }));
  return h(
    'div.controls',
    weight('alpha1', 'α₁, β₁'),
    weight('alpha2', 'α₂, β₂'),
    options('Compare (GTPO)', 'compare', {
      column: 'column: same position',
      row: 'row: same answer',
      matrix: 'matrix: all tokens',
      turn: 'turn: same turn',
    }),
    options('Average', 'average', { arithmetic: 'arithmetic', geometric: 'geometric' }),
    options('Pool', 'pool', { group: 'group', joint: 'joint', sign: 'sign', outcome: 'outcome (keeps signs)' }),
    options('Spread', 'spread', { both: 'both outcomes', correct: 'correct only', wrong: 'wrong only' }),
    h('button.small', { disabled: !view.what, onclick: () => use(null) }, 'Settings of the run'),
  );
}

function compareView(group) {
  if (!hasEntropy(group))
    return h('p.calm', 'The three methods are recomputed from token entropies, and this run recorded none.');
  const settings = view.what || settingsOf(group);
  const tables = METHODS.map((method) => advantages(group, method, settings));
  const scale = shareScale(tables, group);
  const reach = percent(scale.reach, scale.reach < 0.1 ? 1 : 0);
  return h(
    'div.compare',
    compareControls(settings),
    h(
      'div.legend',
      legendPart(['credit −', reach], 'ramp-up.ramp-plus', `+${reach}`),
      legendPart(['blame −', reach], 'ramp-up.ramp-less', `+${reach}`),
      quiet('relative to the mean token of the same outcome; one scale for all three'),
    ),
    !hasSignal(group) &&
      h('p.calm', 'All answers of this group have the same outcome, so no method learns anything from it.'),
    [true, false].map((correct) => comparedRow(group, correct, tables, scale)),
  );
}
