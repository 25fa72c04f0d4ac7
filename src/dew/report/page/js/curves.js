// Curves: one chart per question. One run: a colour per metric. Several: a colour per arm, a dash per metric.

/** What drawn charts depend on. */
const curvesLook = () => [state.smooth, state.seeds, state.as, state.hide, isDark(), window.innerWidth].join();

function curvesNote(runs) {
  const { sample: some } = runs.find(({ sample }) => sample.steps < sample.steps_of) || {};
  const sample = some ? ` ${whole(some.steps)} of ${whole(some.steps_of)} steps are shown.` : '';
  return `By step. Numbers are not smoothed. Drag to zoom, double-click to reset. Dotted lines are alarms.${sample}`;
}

const MOST_CHIPS = 16;
let pointedRuns = [];

/** The lines of these runs before all others, in the charts that are drawn. */
const highlight = (members) => figures().forEach((frame) => frame.highlight?.((pointedRuns = members)));

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
    pointedRuns = []; // the entry that was pointed at is removed
    refill(bar, curveControls(runs, bar));
    bar.querySelectorAll('button')[at]?.focus();
    drawVisible();
  };
  const oninput = ({ target }) => setting('smooth', drawVisible)(target.value);
  const range = { type: 'range', min: 0, max: 1, step: 0.05, value: state.smooth };
  const ways = { each: 'each run', mean: 'mean ± standard deviation' };
  const shownAs = { values: 'values', differences: 'differences from the baseline' };
  const changeSeeds = (seeds) => [set({ seeds, hide: '' }), redo()];
  return [
    taskChoice(),
    labelled('Smoothing', h('input', { id: 'smooth', ...range, oninput })),
    arms().length > 1 && choice('Show', shownAs, isDifference() ? 'differences' : 'values', setting('as', redo)),
    hasSeeds() && choice('Seeds', ways, isMerged() ? 'mean' : 'each', changeSeeds),
    runLegend(redo),
    quiet(curvesNote(runs)),
  ];
}

function curves({ runs, charts }) {
  if (!charts.length) return h('div.page', h('p.calm', 'This run recorded no metrics, so there are no curves.'));
  const made = (folded) => {
    const found = charts.filter((each) => each.folded === folded);
    return h('div.charts', found.map(({ title, names, note, log }) => chart(runs, title, names, note, log)));
  };
  const others = made(true);
  const count = others.childElementCount;
  const more = h('details.more', { ontoggle: drawVisible }, h('summary', `Other metrics (${count})`), others);
  const bar = h('div.controls');
  const page = h('div.page.wide', bar, made(false), count > 0 && more);
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
