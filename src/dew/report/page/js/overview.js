// What came of the runs: findings in words, one row per metric with all arms on one axis, the settings that differ.

const arms = () => view.report.arms;
const armOf = (r) => arms().findIndex((arm) => arm.runs.includes(r));

/** Runs of one arm share a mark, a colour and a shape; with a single arm, each run has its own. */
const markOf = (r) => (arms().length > 1 ? (arms()[armOf(r)].colour ?? armOf(r)) : r);
const colourOf = (r) => `--run-${markOf(r) % COLOURS}`;
const shapeOf = (r) => SHAPES[Math.floor(markOf(r) / COLOURS) % SHAPES.length];
const dot = (r) => {
  const shape = shapeOf(r)?.map(([x, y]) => `${100 * x}% ${100 * y}%`);
  return h('span', { class: 'dot', '--mark': `var(${colourOf(r)})`, '--shape': shape && `polygon(${shape})` });
};
const runMark = (r) =>
  h('span', { class: 'run-mark', '--mark': `var(${colourOf(r)})`, title: visible(view.report.runs[r].name) }, String(r + 1));

const tile = (label, main, note) =>
  h(
    'div',
    { class: 'tile' },
    h('span', { class: 'tile-label' }, label),
    h('span', { class: 'tile-main' }, main),
    note && h('span', { class: 'tile-note' }, note),
  );

function sampled(run) {
  const { groups, of, files, files_of: filesOf } = run.sample;
  if (files < filesOf) return `a sample: ${whole(files)} of ${whole(filesOf)} recorded steps`;
  return groups < of ? `a sample: ${whole(groups)} of ${whole(of)}` : 'all recorded groups';
}

const SIGNS = { bad: '▲', good: '✓', note: '●' };

function finding({ kind, text, remedy, link }) {
  return h(
    'li',
    { class: `finding ${kind}` },
    h('span', { class: 'finding-sign', 'aria-hidden': 'true' }, SIGNS[kind]),
    h(
      'div',
      {},
      h('p', {}, visible(text), ' ', link && h('a', { href: link, 'aria-label': `Show: ${visible(text)}` }, 'show')),
      remedy && h('p', { class: 'remedy quiet' }, h('b', {}, 'Remedy: '), visible(remedy)),
    ),
  );
}

function findings(report) {
  const nothing = report.runs.some((run) => run.metrics.step || run.groups.length)
    ? '✓ No alarms, and nothing unusual in the curves or in the recorded tokens.'
    : 'No metrics and no tokens were recorded, so there is nothing to check.';
  const list = report.findings.length ? h('ul', { class: 'findings' }, report.findings.map(finding)) : calm(nothing);
  return h('section', {}, h('h2', {}, 'Findings'), list);
}

/** A score or a share is shown in percent. */
const shares = (name) => /@|_share$|^accuracy$|^clip\//.test(name);
const shownAs = (name) => (shares(name) ? (x) => percent(x, 1) : number);

/** One arm's values on the row's axis: hollow before, solid after, small dots for single runs, a bar for the interval. */
function valuePlot(row, arm, [low, high]) {
  const x = (v) => 8 + (284 * (v - low)) / (high - low || 1);
  const of = (list) => arm.runs.map((r) => list[r]).filter((v) => v !== null);
  const [before, after] = [of(row.before), of(row.after)];
  const colour = { '--mark': `var(${colourOf(arm.runs[0])})` };
  const r = arm.runs[0];
  return s(
    'svg',
    { viewBox: '0 0 300 22', class: 'row-plot', 'aria-hidden': 'true', ...colour },
    s('path', { d: 'M8,0v22M79,0v22M150,0v22M221,0v22M292,0v22', class: 'grid' }),
    arm.runs.length === 1 &&
      row.low[r] !== null &&
      s('line', { x1: x(row.low[r]), x2: x(row.high[r]), y1: 11, y2: 11, class: 'interval' }),
    before.length && after.length
      ? s('line', { x1: x(mean(before)), x2: x(mean(after)), y1: 11, y2: 11, class: 'path' })
      : null,
    arm.runs.length > 1 && after.map((v) => s('circle', { cx: x(v), cy: 11, r: 2.5, class: 'one' })),
    before.length ? s('circle', { cx: x(mean(before)), cy: 11, r: 4, class: 'before' }) : null,
    after.length ? s('circle', { cx: x(mean(after)), cy: 11, r: 5, class: 'after' }) : null,
  );
}

/** A difference and its interval beside the line of no difference. */
function forest(difference, reach) {
  const x = (v) => 100 + (92 * Math.max(-reach, Math.min(reach, v))) / reach;
  const { value, low, high } = difference;
  return s(
    'svg',
    { viewBox: '0 0 200 22', class: 'row-plot forest', 'aria-hidden': 'true' },
    s('line', { x1: 100, x2: 100, y1: 0, y2: 22, class: 'zero' }),
    s('line', { x1: x(low), x2: x(high), y1: 11, y2: 11, class: 'interval' }),
    s('rect', { x: x(value) - 4, y: 7, width: 8, height: 8, class: difference.within_noise ? 'noise' : 'clear' }),
  );
}

const judged = ({ within_noise: noise, verdict, value }) => (noise ? verdict : value > 0 ? 'higher' : 'lower');

function axisOf(row) {
  const known = [...row.before, ...row.after, ...row.low, ...row.high].filter((v) => v !== null);
  if (shares(row.name)) return [0, 1];
  return [Math.min(0, ...known), Math.max(...known, 1e-9)];
}

function rowCard(row) {
  const show = shownAs(row.name);
  const axis = axisOf(row);
  const reach = Math.max(1e-9, ...row.differences.flatMap((d) => [Math.abs(d.low), Math.abs(d.high)]).filter((v) => v < 1));
  const points = (v) => (shares(row.name) ? minus((100 * v).toFixed(1)) : short(v));
  const lines = arms().map((arm) => {
    const of = (list) => arm.runs.map((r) => list[r]).filter((v) => v !== null);
    const [before, after] = [of(row.before), of(row.after)];
    if (!after.length && !before.length) return null;
    const difference = row.differences.find((d) => d.arm === arm.label);
    const r = arm.runs[0];
    const single = arm.runs.length === 1 && row.low[r] !== null;
    return h(
      'div',
      { class: 'row-line', 'data-arm': arm.label },
      h('span', { class: 'row-arm' }, armChip(arm), arm.runs.length > 1 && quiet(` × ${arm.runs.length}`)),
      valuePlot(row, arm, axis),
      h(
        'span',
        { class: 'row-values' },
        before.length ? [show(mean(before)), ' → '] : '',
        h('b', {}, after.length ? show(mean(after)) : '–'),
        single && quiet(` [${points(row.low[r])}, ${points(row.high[r])}]`),
        after.length > 1 && quiet(` ± ${points(spread(after))}`),
      ),
      difference ? forest(difference, reach) : h('span'),
      h(
        'span',
        { class: 'row-difference' },
        difference && [
          h('b', {}, `${difference.value > 0 ? '+' : ''}${points(difference.value)}`),
          ` [${points(difference.low)}, ${points(difference.high)}] `,
          quiet(difference.score === 'area' && row.name !== 'area' ? 'area, ' : '', judged(difference)),
        ],
      ),
    );
  });
  return h(
    'section',
    { class: 'row', 'data-metric': row.name, '--lines': lines.filter(Boolean).length },
    h(
      'h3',
      {},
      row.link.startsWith('#curves') ? h('a', { href: row.link }, visible(row.name)) : visible(row.name),
      quiet(` ${visible(row.note)}`),
    ),
    lines,
  );
}

const armChip = (arm) =>
  h('span', { class: 'arm' }, dot(arm.runs[0]), visible(arm.label));

function rowsCsv({ rows, runs }) {
  const head = ['metric', 'run', 'arm', 'before', 'after', 'low', 'high'];
  const body = rows.flatMap((row) =>
    runs.map((run, r) => [row.name, run.name, arms()[armOf(r)].label, row.before[r], row.after[r], row.low[r], row.high[r]]),
  );
  return [head, ...body];
}

function rowsSection(report) {
  if (!report.rows.length) return null;
  const paired = report.rows.flatMap((row) => row.differences)[0];
  const many = report.runs.length > 1;
  const text = [
    '○ before or first tenth, ● after or last tenth of training',
    many && report.runs.length > arms().length ? '· single runs, ± their standard deviation' : '',
    paired
      ? `■ difference from ${visible(paired.baseline)}, paired by ${paired.unit === 'seeds' ? 'seed' : 'problem'}, with its 95 % interval`
      : '',
  ];
  return h(
    'section',
    {},
    h('div', { class: 'head' }, h('h2', {}, 'Results'), saveButtons('results', () => rowsCsv(report))),
    h('p', { class: 'quiet' }, text.filter(Boolean).join('; '), '. Bars are 95 % intervals.'),
    h('div', { class: `rows${paired ? ' paired' : ''}` }, report.rows.map(rowCard)),
  );
}

function said(value) {
  if (value === null || value === undefined || value === '') return '–';
  if (Array.isArray(value)) return value.map(said).join(', ');
  if (typeof value === 'object')
    return (
      Object.entries(value)
        .map(([k, v]) => `${k} ${said(v)}`)
        .join(' · ') || '–'
    );
  return visible(String(value));
}

/** A table with one column per run, or per arm where there are many runs. */
function settingsTable(title, names, value, columns) {
  if (!names.length) return null;
  const head = columns.length > 1 && [h('td'), ...columns.map((column) => column.head())];
  const rows = names.map((name) => [visible(name).replace(/_/g, ' '), ...columns.map(({ r }) => value(name, r))]);
  const region = { class: 'scroll-x', tabindex: 0, role: 'region', 'aria-label': title };
  return h('section', {}, h('h2', {}, title), h('div', region, table('facts', head, rows)));
}

const columnsFor = ({ runs }) =>
  runs.length <= 8
    ? runs.map((run, r) => ({ r, head: () => [runMark(r), visible(run.name)] }))
    : arms().map((arm) => ({ r: arm.runs[0], head: () => armChip(arm) }));

function differing(report) {
  const rows = report.settings.filter((row) => row.name !== 'seed' || report.runs.length <= 8);
  const title = 'Settings that differ';
  return report.runs.length > 1
    ? settingsTable(title, rows.map((row) => row.name), (name, r) => said(rows.find((row) => row.name === name).values[r]), columnsFor(report))
    : null;
}

function facts(report) {
  const runs = report.runs.slice(0, 8);
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.facts)))].filter((name) => !['schema', 'name'].includes(name));
  const value = (name, r) => {
    const fact = report.runs[r].facts[name];
    if (name !== 'algorithm' || fact === null || typeof fact !== 'object') return said(fact);
    return [said(fact.name), fact.settings && h('div', { class: 'quiet' }, said(fact.settings))];
  };
  return h(
    'details',
    { class: 'all-facts' },
    h('summary', {}, 'Everything about the runs'),
    settingsTable('Runs', names, value, columnsFor(report)),
    runs
      .filter((run) => run.config)
      .map((run) => [h('h3', {}, `config.yaml of ${visible(run.name)}`), h('pre', { class: 'config', tabindex: 0 }, visible(run.config))]),
  );
}

function heading({ runs, title }) {
  const steps = runs.map((run) => last(run.metrics.step || []) || 0);
  const status = [...new Set(runs.map((run) => run.facts.status).filter(Boolean))].map(said).join(', ');
  const groups = sum(runs.map((run) => run.groups.length));
  return h(
    'header',
    { class: 'report-title' },
    h('h1', {}, visible(title)),
    h(
      'p',
      { class: 'quiet' },
      [
        runs.length > 1 && `${plural(runs.length, 'run')} in ${plural(arms().length, 'arm')}`,
        Math.max(...steps) > 0 && plural(Math.max(...steps), 'step'),
        groups > 0 && plural(groups, 'recorded group'),
        runs.length < view.whole.runs.length && `${whole(view.whole.runs.length)} runs of all tasks`,
        status,
      ]
        .filter(Boolean)
        .join(' · '),
    ),
  );
}

function overview(report) {
  const page = h(
    'div',
    { class: 'page' },
    heading(report),
    taskChoice(),
    findings(report),
    rowsSection(report),
    differing(report),
    facts(report),
    h(
      'p',
      { class: 'quiet' },
      `Made ${report.made} by dew ${report.dew}. This page is self-contained: it makes no network requests.`,
    ),
  );
  page.shown = () => {
    const row = state.chart && page.querySelector(`.row[data-metric="${CSS.escape(state.chart)}"]`);
    if (row) row.scrollIntoView({ block: 'center' });
  };
  return page;
}
