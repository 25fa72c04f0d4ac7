// What came of the runs: findings in words, one row per metric with all arms on one axis, the settings that differ.

const arms = () => view.report.arms;
const armOf = (r) => arms().findIndex((arm) => arm.runs.includes(r));
const manyRuns = () => view.report.runs.length > 1;

/** Runs of one arm share a mark, a colour and a shape; with a single arm, each run has its own. */
const markOf = (r) => (arms().length > 1 ? (arms()[armOf(r)].colour ?? armOf(r)) : r);
const colourOf = (r) => `--run-${markOf(r) % COLOURS}`;
const shapeOf = (r) => SHAPES[(SHAPE_OF[markOf(r) % COLOURS] + Math.floor(markOf(r) / COLOURS)) % SHAPES.length];
const dot = (r) => {
  const shape = shapeOf(r)?.map(([x, y]) => `${100 * x}% ${100 * y}%`);
  return h('span.dot', { '--mark': `var(${colourOf(r)})`, '--shape': shape && `polygon(${shape})` });
};
const runMark = (r) =>
  manyRuns() && h('span.run-mark', { '--mark': `var(${colourOf(r)})`, title: runName(r) }, String(r + 1));
const runName = (r) => visible(view.report.runs[r].name);
/** Without the settings in its brackets where that names one arm only; these are shown on hover. */
function shortName({ label }) {
  const cut = (text) => text.replace(/\(.*\)/, '(…)');
  return visible(arms().filter((arm) => cut(arm.label) === cut(label)).length > 1 ? label : cut(label));
}
const armChip = (arm) => h('span.arm', { title: visible(arm.label) }, dot(arm.runs[0]), shortName(arm));

const KINDS = { // sign and heading
  verdict: ['●', 'Comparison'], bad: ['▲', 'Problems'], amber: ['▲', 'Properties of the rule'], good: ['✓', 'Improved'],
  note: ['●', 'Notes'],
};

function finding({ kind, text, remedy, link }) {
  const show = link && h('a', { href: link, 'aria-label': `Show: ${visible(text)}` }, 'show');
  return h(`li.finding.${kind}`,
    h('span.finding-sign', { 'aria-hidden': 'true' }, KINDS[kind][0]),
    h('div', h('p', visible(text), ' ', show), remedy && h('p.quiet', h('b', 'Remedy: '), visible(remedy))),
  );
}

function findings(report) {
  const nothing = report.runs.some((run) => run.metrics.step || run.groups.length)
    ? '✓ No alarms, and nothing unusual in the curves or in the recorded tokens.'
    : 'No metrics and no tokens were recorded, so there is nothing to check.';
  const found = report.findings.filter(({ ended }) => !ended);
  const kinds = [...new Set(found.map(({ kind }) => kind))];
  const list = (kind) => [h('h3', KINDS[kind][1]), h('ul.findings', found.filter((f) => f.kind === kind).map(finding))];
  return h('section', h('h2', 'Findings'), kinds.length ? kinds.map(list) : h('p.calm', nothing));
}

/** Why runs that are not complete no longer train. */
const endings = ({ findings: all }) =>
  all.some(({ ended }) => ended) && h('ul.findings.endings', all.filter(({ ended }) => ended).map(finding));

/** A list of these runs, the chosen one in the state by its number from 1; with `every`, also all of them. */
const chooseRun = (name, value, runs, redraw, every = []) =>
  choice('Run', every.concat(runs.map((r) => [String(r + 1), `${r + 1} ${runName(r)}`])), value, setting(name, redraw));

/** A score or a share is shown in percent. */
const shares = (name) => /@|_share$|^(accuracy|area|final)$|^clip\//.test(name);

/** A difference as text: of shares in points. */
const pointsOf = (name) => (v) => (shares(name) ? minus((100 * v).toFixed(1)) : short(v));

/** A place on a plot as wide as its axis. */
const along = (share) => `${3 + 94 * share}%`;
const upright = (name, x) => s(`line.${name}`, { x1: x, x2: x, y1: 0, y2: 22 });
const level = (name, from, to) => s(`line.${name}`, { x1: from, x2: to, y1: 11, y2: 11 });

/** One arm's values on the row's axis: hollow before, solid after, dots for single runs, a bar for an interval. */
function valuePlot(arm, before, after, interval, [low, high]) {
  const x = (v) => along((v - low) / (high - low || 1));
  const circle = (v, r, name) => s(`circle.${name}`, { cx: x(v), cy: 11, r });
  return s('svg.row-plot', { 'aria-hidden': 'true', '--mark': `var(${colourOf(arm.runs[0])})` },
    [0, 0.25, 0.5, 0.75, 1].map((share) => upright('grid', along(share))),
    interval && level('interval', ...interval.map(x)),
    before.length > 0 && after.length > 0 && level('path', x(mean(before)), x(mean(after))),
    arm.runs.length > 1 && after.map((v) => circle(v, 2.5, 'one')),
    before.length > 0 && circle(mean(before), 4, 'before'),
    after.length > 0 && circle(mean(after), 5, 'after'),
  );
}

/** A difference and its interval beside the line of no difference. */
function forest({ value, low, high, within_noise: noise }, reach) {
  const x = (v) => along(0.5 + Math.max(-reach, Math.min(reach, v)) / (2 * reach));
  return s('svg.row-plot.forest', { 'aria-hidden': 'true' },
    upright('zero', '50%'),
    level('interval', x(low), x(high)),
    s(`rect.${noise ? 'noise' : 'clear'}`, { x: x(value), y: 7, width: 8, height: 8 }),
  );
}

/** The end of an axis of differences; intervals of two seeds may be far longer. */
function reachOfAll(differences) {
  const ends = differences.flatMap((d) => [Math.abs(d.low), Math.abs(d.high)]);
  return Math.max(1e-9, ...ends.filter((v) => v < 1 || !differences.some((d) => shares(d.score))));
}

function axisOf(row) {
  const values = known([...row.before, ...row.after, ...row.low, ...row.high]);
  if (shares(row.name)) return [0, Math.min(1, Math.ceil(10 * Math.max(0.1, ...values)) / 10)];
  const ends = [Math.min(0, ...values), Math.max(0, ...values)];
  return ends[0] < ends[1] ? ends : [0, 1];
}

/** One arm in a row: its values, drawn and in numbers, and its difference from the baseline. */
function rowLine(row, arm, reach) {
  const [before, after] = [row.before, row.after].map((list) => known(arm.runs.map((r) => list[r])));
  if (!after.length && !before.length) return null;
  const show = shares(row.name) ? (x) => percent(x, 1) : number;
  const points = pointsOf(row.name);
  const range = (low, high) => ` [${points(low)}, ${points(high)}]`;
  const [r] = arm.runs;
  const interval = arm.runs.length === 1 && row.low[r] !== null && [row.low[r], row.high[r]];
  const difference = row.differences.find((d) => d.arm === arm.label);
  const verdict = difference?.within_noise ? difference.verdict : difference?.value > 0 ? 'higher' : 'lower';
  return h('div.row-line', { 'data-arm': arm.label },
    h('span.row-arm', armChip(arm), arm.runs.length > 1 && quiet(` × ${arm.runs.length}`)),
    valuePlot(arm, before, after, interval, axisOf(row)),
    h('span.row-values',
      before.length > 0 && [show(mean(before)), ' → '],
      h('b', after.length ? show(mean(after)) : '–'),
      interval && quiet(range(...interval)),
      after.length > 1 && quiet(` ± ${points(spread(after))}`),
    ),
    difference ? forest(difference, reach) : h('span'),
    h('span.row-difference',
      difference && [
        h('b', signed(difference.value, points)),
        `${shares(row.name) ? ' points' : ''}${range(difference.low, difference.high)} `,
        quiet(verdict),
      ],
    ),
  );
}

function rowCard(row) {
  const reach = reachOfAll(row.differences);
  const name = visible(row.name);
  const title = row.link.startsWith('#curves') ? h('a', { href: row.link }, name) : name;
  const show = shares(row.name) ? (v) => percent(v) : short;
  const axis = (...ends) => h('span.axis', ends.map((v) => h('span', v)));
  const differs = reach > 1e-8 && axis(pointsOf(row.name)(-reach), '0', `+${pointsOf(row.name)(reach)}`);
  const card = h('section.row', { 'data-metric': row.name, '--lines': arms().length });
  const redraw = () =>
    refill(card,
      h(mainRows(view.report).includes(row) ? 'h2' : 'h3', title, quiet(` ${visible(row.note)}`)),
      arms().map((arm) => rowLine(row, arm, reach)),
      h('div.row-line.row-axis', h('span', ' '), axis(...axisOf(row).map(show)), h('span.row-values', ' '), differs),
    );
  return Object.assign(card, { redraw, later: true, waits: () => !card.firstChild });
}

function rowsSection(report) {
  const rest = report.rows.filter((row) => !mainRows(report).includes(row));
  if (!rest.length) return null;
  const differences = report.rows.flatMap((row) => row.differences);
  const [from, unit] = ['baseline', 'unit'].map((key) => [...new Set(differences.map((d) => d[key]))].join(' or '));
  const text = [
    '○ before or first tenth, ● after or last tenth of training',
    report.runs.length > arms().length && '· single runs, ± their standard deviation',
    from && `■ difference from ${visible(from)}, paired by ${unit.replace(/s\b/g, '')}, with its 95% interval`,
  ];
  return h('section',
    h('h2', 'Results'),
    h('p.quiet', text.filter(Boolean).join('; '), '. Bars are 95% intervals.'),
    h(from ? 'div.rows.paired' : 'div.rows', rest.map(rowCard)),
  );
}

function said(value) {
  if (!isKnown(value) || value === '') return '–';
  if (Array.isArray(value)) return value.map(said).join(', ');
  if (typeof value !== 'object') return visible(String(value));
  return Object.entries(value).map(([k, v]) => `${k} ${said(v)}`).join(' · ') || '–';
}

const MOST_COLUMNS = 8;

/** A table with one column per run, or per arm where there are many runs. */
function settingsTable(title, names, value, { runs }) {
  if (!names.length) return null;
  const each = runs.length <= MOST_COLUMNS;
  const columns = each
    ? runs.map((_, r) => [r, [runMark(r), runName(r)]])
    : arms().map((arm) => [arm.runs[0], armChip(arm)]);
  const head = columns.length > 1 && [h('td'), ...columns.map(([, name]) => name)];
  const rows = names.map((name) => [visible(name).replace(/_/g, ' '), ...columns.map(([r]) => value(name, r))]);
  return h('section', h('h2', title), region('div.scroll-x', title, table('facts', head, rows)));
}

function differing(report) {
  const values = Object.fromEntries(report.settings.map((row) => [row.name, row.values]));
  if (report.runs.length > MOST_COLUMNS) delete values.seed;
  return settingsTable('Settings that differ', Object.keys(values), (name, r) => said(values[name][r]), report);
}

function facts(report) {
  const runs = report.runs.slice(0, MOST_COLUMNS);
  const names = new Set(runs.flatMap(({ facts: { schema, name, ...shown } }) => Object.keys(shown)));
  const value = (name, r) => said(report.runs[r].facts[name]);
  const config = ({ name, config: text }) =>
    text && [h('h3', `config.yaml of ${visible(name)}`), h('pre.config', { tabindex: 0 }, visible(text))];
  return h('details.all-facts',
    h('summary', 'Everything about the runs'),
    settingsTable('Runs', [...names], value, report),
    runs.map(config),
  );
}

/** How far a run that still trains is: [76/120, 4 min left, last step at 12:03:10]. */
function progressOf({ facts: { status, steps }, metrics: { step = [], time = [] } }) {
  if (status !== 'running' || !steps || !step.length) return [];
  const left = ((last(time) - time[0]) / Math.max(1, last(step) - step[0])) * (steps - last(step));
  const when = isKnown(last(time)) && `last step at ${new Date(1000 * last(time)).toLocaleTimeString()}`;
  const time_left = left > 90 ? `${whole(left / 60)} min` : `${whole(left)} s`;
  return [`${last(step)}/${steps}`, left > 0 && `${time_left} left`, when];
}

/** The tab's title: progress and alarms of the runs that still train, then their names. */
function nameTab({ runs, title }) {
  const found = runs.map(progressOf).filter(([at]) => at);
  const alarms = found.length > 0 && sum(runs.map((run) => run.alarms.length));
  document.title = [found[0]?.[0], alarms > 0 && `▲${alarms}`, `${visible(title)} · dew`].filter(Boolean).join(' ');
}

function heading({ runs, title, headline, findings: all }) {
  const problems = all.filter(({ kind }) => kind === 'bad').length;
  const counts = [
    !view.whole.tasks && visible(title),
    manyRuns() && `${plural(runs.length, 'run')} in ${plural(arms().length, 'arm')}`,
    view.all.length > 0 && plural(view.all.length, 'recorded group'),
    runs.length < view.whole.runs.length && `${whole(view.whole.runs.length)} runs of all tasks`,
    [...new Set(runs.map((run) => run.facts.status).filter(Boolean))].map(said).join(', '),
    ...(runs.length === 1 ? progressOf(runs[0]) : []),
    problems > 0 && `▲ ${plural(problems, 'problem')}`,
  ];
  const about = h('p.quiet', counts.filter(Boolean).join(' · '));
  return h('header.report-title', h('h1', visible((!view.whole.tasks && headline) || title)), about);
}

/** The learning curve beside the first scores, above them for many arms; compared arms show their differences. */
const isPaired = ({ rows }) => rows.some((row) => row.differences.length);
const mainRows = (report) => report.rows.slice(0, isPaired(report) ? 2 : 4);
function main(report) {
  const shown = report.charts.filter(({ folded }) => !folded).concat(report.charts); // a metric that changes comes first
  const name = shown.flatMap(({ names }) => names).find((key) => ['accuracy', 'reward'].includes(key));
  const curve = name && chart(report.runs, 'Learning curve', [name], `${name} in training, by step`);
  const look = arms().length > 2 * MANY_LINES ? 'div.charts.wide' : 'div.charts.two';
  return h(look, curve, h(isPaired(report) ? 'div.rows.paired' : 'div.rows', mainRows(report).map(rowCard)));
}

/** The differences of all arms from their baselines, in all tasks of a study. */
function everyTask({ tasks }) {
  if (!tasks) return null;
  const found = tasks.map(({ rows }) => rows[0]?.differences || []);
  const reach = reachOfAll(found.flat());
  const [{ name: score, note: about = '' } = {}] = tasks[0].rows;
  const points = pointsOf(score);
  const cut = ({ arm }) => arm.replace(/ @ [^@]*$/, ''); // a rule may have another learning rate in each task
  const nameOf = found.every((of) => new Set(of.map(cut)).size === of.length) ? cut : ({ arm }) => arm;
  const cell = (d) => d && h('span.cell', { title: visible(d.arm) }, forest(d, reach), h('b', signed(d.value, points)));
  const names = [...new Set(found.flat().map(nameOf))];
  const rows = names.map((name) => [visible(name), ...found.map((of) => cell(of.find((d) => nameOf(d) === name)))]);
  const title = `Differences from ${visible(cut({ arm: found.flat()[0]?.baseline ?? 'the baseline' }))} in every task`;
  const all = table('facts', ['arm', ...tasks.map(({ task }) => visible(task))], rows);
  const note = `${visible(about.replace(/^.*?: /, ''))} (${score})${shares(score) ? ', in percentage points' : ''}`;
  const axes = `all axes from ${points(-reach)} to +${points(reach)}, 95% intervals; hollow: within noise.`;
  return h('section', h('h2', title), h('p.quiet', `${note}; ${axes}`), region('div.scroll-x', title, all));
}

function overview(report) {
  const made = `Made ${report.made} by dew ${report.dew}. This page is self-contained: it makes no network requests.`;
  const sections = [endings, main, findings, rowsSection, differing, facts].map((section) => section(report));
  const page = h('div.page', heading(report), everyTask(view.whole), taskChoice(), sections, h('p.quiet', made));
  page.shown = () => {
    drawVisible();
    const row = state.chart && page.querySelector(`.row[data-metric="${CSS.escape(state.chart)}"]`);
    if (row) row.scrollIntoView({ block: 'center' });
  };
  return page;
}
