// Curves: one chart per question. One run: a colour per metric. Several: a colour per run, a dash per metric.

const CHARTS = [
  ['Reward', /^(reward|accuracy)$/, 'mean reward, and the share of correct answers'],
  ['Parts of the reward', /^reward\/(?!.*\/std$)/, 'each reward function separately'],
  ['Pass@k', /^eval\/(pass|mean)@/, 'on held-out problems'],
  ['Entropy', /^entropy(\/(correct|wrong))?$/, 'a slow decrease is normal; near 0 all answers are the same'],
  ['Length', /^length\/(mean|correct|wrong)$/, 'tokens per answer'],
  ['Truncated answers', /^length\/truncated_share$/, 'share that reached the length limit'],
  ['Groups', /^groups\/(sampled|kept|dropped|refilled)$/, 'prompts per step'],
  ['Groups with signal', /^groups\/mixed_share$/, 'share with correct and wrong answers'],
  [
    'Concentration of credit',
    /^credit\/(top20_share|top1_share)$/,
    'share of |credit| on the top 20 % of tokens, and on the top token',
  ],
  ['Clipped tokens', /^clip\/(low|high)$/, 'share outside the trust region'],
  ['Ratio', /^ratio\/(mean|max)$/, 'new policy / old policy', true],
  ['KL', /^kl\//, 'distance from the old policy or the reference'],
  ['Tokens per second', /^tokens_per_second$/, 'of the whole loop'],
  ['Seconds per phase', /^seconds\//, 'where the time goes'],
  ['Loss', /^loss$/, 'not a measure of progress here'],
  ['Gradient norm', /^grad_norm$/, '0 means that nothing is learned', true],
];

const redraw = () => curvesState.plots.filter(({ box }) => box.offsetParent).forEach(({ draw }) => draw());

function curvesNote(runs) {
  const thinned = runs.filter((run) => run.sample.steps < run.sample.steps_of);
  const sample = thinned.map((run) => ` ${whole(run.sample.steps)} of ${whole(run.sample.steps_of)} steps are shown.`);
  return `Faint lines and numbers are not smoothed. Drag to zoom, double-click to reset. Dotted vertical lines are alarms.${sample.join('')}`;
}

function curveControls(runs) {
  const smoothing = h('input', {
    type: 'range',
    min: 0,
    max: 0.98,
    step: 0.02,
    value: curvesState.smooth,
    id: 'smooth',
  });
  smoothing.addEventListener('input', () => {
    curvesState.smooth = Number(smoothing.value);
    redraw();
  });
  const merge = (value) => {
    curvesState.merge = value === 'merge';
    redraw();
  };
  const ways = [
    ['each', 'each run'],
    ['merge', 'mean ± standard deviation'],
  ];
  const key = runs.map((run, r) => h('span', {}, runMark(r), visible(run.name)));
  return h(
    'div',
    { class: 'controls' },
    h('label', { class: 'choice' }, h('span', {}, 'Smoothing'), smoothing),
    seedSets(runs).some((set) => set.length > 1) && choice('Seeds', ways, 'each', merge),
    runs.length > 1 && h('div', { class: 'run-key' }, key),
    h('span', { class: 'quiet' }, curvesNote(runs)),
  );
}

function curves({ runs }) {
  const all = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].filter(
    (name) => name !== 'step' && name !== 'time',
  );
  if (!all.length)
    return h(
      'div',
      { class: 'page' },
      h('p', { class: 'calm' }, 'This run recorded no metrics, so there are no curves.'),
    );
  const rest = all.filter((name) => !CHARTS.some(([, pattern]) => pattern.test(name)));
  const main = CHARTS.map(([title, pattern, note, log]) => {
    const names = all.filter((name) => pattern.test(name));
    return names.length ? chart(runs, title, names, note, log) : null;
  });
  const more = h(
    'details',
    { class: 'more', ontoggle: redraw },
    h('summary', {}, `Other metrics (${rest.length})`),
    h(
      'div',
      { class: 'charts' },
      rest.map((name) => chart(runs, name, [name], '')),
    ),
  );
  const page = h(
    'div',
    { class: 'page wide' },
    curveControls(runs),
    h('div', { class: 'charts' }, main),
    rest.length > 0 && more,
  );
  page.shown = redraw;
  page.addEventListener('mouseup', () => (curvesState.zoomed = true));
  page.addEventListener('dblclick', () => (curvesState.zoomed = false));
  window.addEventListener('resize', () => curvesState.plots.forEach(({ resize }) => resize()));
  return page;
}
