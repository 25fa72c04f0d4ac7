// Curves: one chart per question. One run: a colour per metric. Several: a colour per arm, a dash per metric.

const CHARTS = [
  ['Reward', /^(reward|accuracy)$/, 'mean reward, and the share of correct answers'],
  ['Parts of the reward', /^reward\/(?!.*\/std$)/, 'each reward function separately'],
  ['Pass@k', /^eval\/(pass|mean)@/, 'on held-out problems'],
  ['Flipped tokens', /^credit\/flipped_share$/, 'share of tokens with credit of the wrong sign'],
  ['Entropy', /^entropy(\/(correct|wrong))?$/, 'a slow decrease is normal; near 0 all answers are the same'],
  ['Length', /^length\/(mean|correct|wrong)$/, 'tokens per answer'],
  ['Truncated answers', /^length\/truncated_share$/, 'share that reached the length limit'],
  ['Groups', /^groups\/(sampled|kept|dropped|refilled)$/, 'prompts per step'],
  ['Groups with signal', /^groups\/mixed_share$/, 'share with correct and wrong answers'],
  ['Concentration of credit', /^credit\/top\d+_share$/, 'share of |credit| on the top 20% of tokens and the top one'],
  ['Clipped tokens', /^clip\/(low|high)$/, 'share outside the trust region'],
  ['Ratio', /^ratio\/(mean|max)$/, 'new policy / old policy', true],
  ['KL', /^kl\//, 'distance from the old policy or the reference'],
  ['Tokens per second', /^tokens_per_second$/, 'of the whole loop'],
  ['Seconds per phase', /^seconds\//, 'where the time goes'],
  ['Loss', /^loss$/, 'not a measure of progress here'],
  ['Gradient norm', /^grad_norm$/, '0 means that nothing is learned', true],
];

/** What drawn charts depend on. */
const curvesLook = () => [state.smooth, state.seeds, state.as, state.hide, isDark(), window.innerWidth].join();

function curvesNote(runs) {
  const { sample: some } = runs.find(({ sample }) => sample.steps < sample.steps_of) || {};
  const sample = some ? ` ${whole(some.steps)} of ${whole(some.steps_of)} steps are shown.` : '';
  return `Numbers are not smoothed. Drag to zoom, double-click to reset. Dotted lines are alarms.${sample}`;
}

const MOST_CHIPS = 16;

/** The lines of these runs before all others, in the charts that are drawn. */
const highlight = (members) => figures().forEach((frame) => frame.highlight?.(members));

/** One entry per line, or per arm if there are many lines; a click hides it or shows it again. */
function runLegend(redo) {
  const hidden = hiddenRuns();
  const each = !isMerged() && view.report.runs.length <= MOST_CHIPS;
  const sets = each ? lineSets() : arms().map((arm) => arm.runs);
  if (sets.length < 2) return null;
  const toggle = (members) => {
    const now = hiddenRuns();
    const off = members.every((r) => now.has(r));
    for (const r of members) now[off ? 'delete' : 'add'](r);
    set({ hide: [...now].sort((a, b) => a - b).join('.') });
    redo();
  };
  const chip = (members) => {
    const name = each ? runName(members[0]) : visible(arms()[armOf(members[0])].label);
    const acts = {
      'aria-pressed': String(!members.every((r) => hidden.has(r))),
      onclick: () => toggle(members),
      onmouseenter: () => highlight(members),
      onmouseleave: () => highlight([]),
      onfocus: ({ target }) => target.matches(':focus-visible') && highlight(members),
      onblur: () => highlight([]),
    };
    return h('button.chip', acts, dot(members[0]), name, members.length > 1 && quiet(` × ${members.length}`));
  };
  return h('div.run-key', { role: 'group', 'aria-label': 'Show or hide runs' }, sets.map(chip));
}

function curveControls(runs, bar) {
  const redo = () => {
    const at = [...bar.querySelectorAll('button')].indexOf(document.activeElement);
    refill(bar, curveControls(runs, bar));
    bar.querySelectorAll('button')[at]?.focus();
    drawVisible();
  };
  const oninput = ({ target }) => setting('smooth', drawVisible)(target.value);
  const range = { type: 'range', min: 0, max: 1, step: 0.05, value: state.smooth };
  const ways = { each: 'each run', mean: 'mean ± standard deviation' };
  const shownAs = { values: 'values', differences: 'differences from the baseline' };
  const changeSeeds = (seeds) => {
    set({ seeds, hide: '' });
    redo();
  };
  return [
    taskChoice(),
    labelled('Smoothing', h('input', { id: 'smooth', ...range, oninput })),
    arms().length > 1 && choice('Show', shownAs, isDifference() ? 'differences' : 'values', setting('as', redo)),
    hasSeeds() && choice('Seeds', ways, isMerged() ? 'mean' : 'each', changeSeeds),
    runLegend(redo),
    quiet(curvesNote(runs)),
  ];
}

/** Metrics without those that repeat an earlier one in every run, as the only part of a reward does. */
function distinct(runs, names) {
  const equal = (a, b) => a === b || (a && b && a.length === b.length && a.every((v, i) => v === b[i]));
  const repeats = (name) => (other) => runs.every((run) => equal(run.metrics[name], run.metrics[other]));
  return names.filter((name, k) => !names.slice(0, k).some(repeats(name)));
}

function curves({ runs }) {
  const recorded = new Set(['accuracy', ...runs.flatMap((run) => Object.keys(run.metrics))]);
  const isDrawn = (name) => name !== 'step' && name !== 'time' && runs.some((run) => run.metrics[name]);
  const all = distinct(runs, [...recorded].filter(isDrawn));
  if (!all.length) return h('div.page', h('p.calm', 'This run recorded no metrics, so there are no curves.'));
  const values = ({ metrics }, name) => known(metrics[name] || []);
  const isFlat = (name) => runs.every((run) => new Set(values(run, name)).size < 2) && values(runs[0], name).length > 2;
  const moving = all.filter((name) => !isFlat(name));
  const charts = CHARTS.flatMap(([title, pattern, note, log]) => {
    const names = moving.filter((name) => pattern.test(name));
    return names.length ? [chart(runs, title, names, note, log)] : [];
  });
  const rest = all.filter((name) => isFlat(name) || !CHARTS.some(([, pattern]) => pattern.test(name)));
  const others = h('div.charts', rest.map((name) => chart(runs, name, [name], '')));
  const more = h('details.more', { ontoggle: drawVisible }, h('summary', `Other metrics (${rest.length})`), others);
  const bar = h('div.controls');
  const page = h('div.page.wide', bar, h('div.charts', charts), rest.length > 0 && more);
  page.shown = () => {
    refill(bar, curveControls(runs, bar));
    const named = ({ dataset }) => dataset.metrics.split(' ').some((name) => name.startsWith(state.chart));
    const wanted = state.chart && figures().find(named);
    for (const frame of figures()) frame.classList.toggle('wanted', frame === wanted);
    if (wanted && more.contains(wanted)) more.open = true;
    if (wanted) wanted.scrollIntoView({ block: 'center' });
    drawVisible();
  };
  return page;
}
