// The same answers under GRPO, GRPO-S and GTPO, recomputed from the recorded entropies. No training happens here.

const SAYS = {
  GRPO: 'Every token of an answer gets the same credit.',
  'GRPO-S': 'Whole answers are weighted: uncertain correct answers get more reward, confident wrong ones more penalty.',
  GTPO: 'Tokens are weighted: uncertain tokens of correct answers get more reward, confident tokens of wrong ones more penalty.',
};

function pickAnswers(group) {
  return [true, false].map((correct) => {
    const wish = view.compared[correct];
    return group.answers[wish]?.correct === correct
      ? wish
      : group.answers.findIndex((answer) => answer.correct === correct);
  });
}

function methodBlock(group, i, method, m, table, scale) {
  const answer = group.answers[i];
  const spans = answer.tokens.slice(0, FIRST_TOKENS).map((token, t) => {
    const v = table[i][t];
    const span = tokenSpan(token, t);
    if (v === null) span.dataset.hue = 'dead';
    else paint(span, scale.of(m, v, i));
    return span;
  });
  const values = known(table[i]).sort((a, b) => a - b);
  const [low, high] = [values[0], values[values.length - 1]];
  const range = high - low > 1e-6 ? `A from ${number(low)} to ${number(high)}` : `A = ${number(low)} everywhere`;
  return h(
    'div',
    { class: 'method', 'data-i': i, 'data-method': method },
    h('div', { class: 'method-name' }, h('strong', {}, method), quiet(range)),
    h('div', { class: 'tokens' }, spans),
  );
}

function comparedRow(group, i, correct, tables, scale) {
  if (i < 0) return null;
  const same = group.answers
    .map((a, k) => [String(k), `#${k + 1}`])
    .filter(([k]) => group.answers[k].correct === correct);
  return h(
    'section',
    { class: `compared ${correct ? 'right' : 'wrong'}` },
    h(
      'header',
      {},
      outcome(group.answers[i]),
      choice('Answer', same, String(i), (k) => {
        view.compared[correct] = Number(k);
        showGroup();
      }),
    ),
    h(
      'div',
      { class: 'methods' },
      METHODS.map((method, m) => methodBlock(group, i, method, m, tables[m], scale)),
    ),
  );
}

function compareControls(settings) {
  const change = (name) => (value) => {
    view.what = { ...settings, [name]: value };
    showGroup();
  };
  const weight = (name, label) => {
    const onchange = ({ target: { value } }) => value !== '' && Number(value) >= 0 && change(name)(Number(value));
    const look = { type: 'number', min: 0, max: 10, step: 0.1, value: settings[name], 'data-setting': name };
    return h('label', { class: 'choice' }, h('span', {}, label), h('input', { ...look, onchange }));
  };
  const options = (label, name, values) => choice(label, values, settings[name], change(name));
  const reset = () => {
    view.what = null;
    showGroup();
  };
  return h(
    'div',
    { class: 'controls' },
    weight('alpha1', 'α₁, β₁'),
    weight('alpha2', 'α₂, β₂'),
    options('Compare (GTPO)', 'compare', {
      column: 'column: same position',
      row: 'row: same answer',
      matrix: 'matrix: all tokens',
      turn: 'turn: same turn',
    }),
    options('Average', 'average', { arithmetic: 'arithmetic', geometric: 'geometric' }),
    options('Pool', 'pool', {
      group: 'group',
      joint: 'joint',
      sign: 'sign (unlearns)',
      outcome: 'outcome (keeps signs)',
    }),
    options('Spread', 'spread', { both: 'both outcomes', correct: 'correct only', wrong: 'wrong only' }),
    h('button', { class: 'small', disabled: !view.what, onclick: reset }, 'Settings of the run'),
  );
}

function compareView(group) {
  if (!hasEntropy(group))
    return calm('The three methods are recomputed from token entropies, and this run recorded none.');
  const settings = view.what || settingsOf(group);
  const tables = METHODS.map((method) => advantages(group, method, settings));
  const scale = shareScale(tables, group);
  const reach = percent(scale.reach, scale.reach < 0.1 ? 1 : 0);
  const [right, wrong] = pickAnswers(group);
  return h(
    'div',
    { class: 'compare' },
    h(
      'ul',
      { class: 'says' },
      METHODS.map((method) => h('li', {}, h('strong', {}, method), ' ', SAYS[method])),
    ),
    compareControls(settings),
    h(
      'div',
      { class: 'legend' },
      ['plus', 'less'].map((hue) =>
        h(
          'span',
          { class: 'legend-part' },
          h('span', {}, hue === 'plus' ? 'credit −' : 'blame −', reach),
          h('span', { class: `ramp ramp-up ramp-${hue}` }),
          h('span', {}, `+${reach}`),
        ),
      ),
      quiet('relative to the mean token of the same outcome; one scale for all three'),
    ),
    !hasSignal(group) &&
      calm(
        'All answers of this group have the same outcome, so no method learns anything from it. ',
        'Choose a group with both.',
      ),
    comparedRow(group, right, true, tables, scale),
    comparedRow(group, wrong, false, tables, scale),
  );
}
