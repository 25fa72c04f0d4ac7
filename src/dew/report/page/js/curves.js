// Curves: one chart per question. One run: a colour per metric. Several: a colour per run, a dash per metric.

const COLOURS = 8; // --run-0 … --run-7 in the style sheet
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [1, 5]];
const CHARTS = [
  ['Reward', /^(reward|accuracy)$/, 'what the policy is trained for, and the share of right answers'],
  ['Parts of the reward', /^reward\/(?!.*\/std$)/, 'each reward function by itself'],
  ['Pass@k', /^eval\/(pass|mean)@/, 'on held-out problems'],
  ['Entropy', /^entropy(\/(correct|wrong))?$/, 'a slow dip is normal; near 0 all answers are alike'],
  ['Length', /^length\/(mean|correct|wrong)$/, 'tokens per answer'],
  ['Cut-off answers', /^length\/truncated_share$/, 'share that hit the length limit'],
  ['Groups', /^groups\/(sampled|kept|dropped|refilled)$/, 'prompts per step'],
  ['Groups with signal', /^groups\/mixed_share$/, 'share with right and wrong answers'],
  ['Concentration of credit', /^credit\/(top20_share|top1_share)$/, 'share of |credit| on the top 20 % of tokens, and on one'],
  ['Clipped tokens', /^clip\/(low|high)$/, 'share outside the trust region'],
  ['Ratio', /^ratio\/(mean|max)$/, 'new policy over old', true],
  ['KL', /^kl\//, 'distance from the old policy or the reference'],
  ['Tokens per second', /^tokens_per_second$/, 'of the whole loop'],
  ['Seconds per phase', /^seconds\//, 'where the time goes'],
  ['Loss', /^loss$/, 'not a measure of progress here'],
  ['Gradient norm', /^grad_norm$/, '0 means that nothing is learnt', true],
];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const runMark = (r) => h('span', { class: 'run-mark', '--mark': `var(--run-${r % COLOURS})` }, String(r + 1));

const curvesState = { smooth: 0, merge: false, plots: [] };

/** Exponential average that starts unbiased; gaps stay gaps. */
function smoothed(values, keep) {
  if (!keep) return values;
  let average = 0;
  let weight = 0;
  return values.map((v) => {
    if (v === null) return null;
    average = keep * average + (1 - keep) * v;
    weight = keep * weight + (1 - keep);
    return average / weight;
  });
}

/** Runs that differ by their seed alone stand together. */
function seedSets(runs) {
  const sets = new Map();
  runs.forEach((run, r) => {
    const key = JSON.stringify([run.facts.algorithm, run.facts.model, run.facts.data, run.facts.algorithm ? '' : r]);
    if (!sets.has(key)) sets.set(key, []);
    sets.get(key).push(r);
  });
  return [...sets.values()];
}

/** All lines of one chart on a common axis of steps: {label, colour, dash, values, low?, high?}. */
function linesOf(runs, names) {
  const steps = [...new Set(runs.flatMap((run) => run.metrics.step || []))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, i) => [step, i]));
  const aligned = (run, name) => {
    const out = Array(steps.length).fill(null);
    (run.metrics[name] || []).forEach((v, i) => { out[place.get(run.metrics.step[i])] = v; });
    return smoothed(out, curvesState.smooth);
  };
  const sets = curvesState.merge ? seedSets(runs) : runs.map((_, r) => [r]);
  const found = [];
  sets.forEach((members, c) => names.forEach((name, d) => {
    const rows = members.filter((r) => runs[r].metrics[name]).map((r) => aligned(runs[r], name));
    if (!rows.length) return;
    const many = runs.length > 1;
    const who = members.length > 1 ? `${plural(members.length, 'seed')} of run ${members[0] + 1}` : `${members[0] + 1}`;
    const line = { label: many ? `${who} · ${name}` : name, colour: `--run-${(many ? c : d) % COLOURS}`, dash: DASHES[d % DASHES.length], values: rows[0] };
    if (rows.length > 1) {
      const at = (i) => rows.map((row) => row[i]).filter((v) => v !== null);
      const middle = steps.map((_, i) => (at(i).length ? mean(at(i)) : null));
      const wide = steps.map((_, i) => (at(i).length > 1 ? spread(at(i)) : 0));
      Object.assign(line, {
        values: middle, low: middle.map((m, i) => (m === null ? null : m - wide[i])), high: middle.map((m, i) => (m === null ? null : m + wide[i])),
      });
    }
    found.push(line);
  }));
  return [steps, found];
}

function chart(runs, title, names, note, log) {
  const box = h('div', { class: 'plot' });
  const values = h('div', { class: 'plot-lines' });
  const logButton = h('button', { class: 'small', 'aria-pressed': String(Boolean(log)), title: 'Logarithmic axis' }, 'log');
  const frame = h('figure', { class: 'chart' }, h('figcaption', {}, h('span', {}, h('strong', {}, title), ' ', h('span', { class: 'quiet' }, note)), logButton), values, box);
  const state = { log: Boolean(log) && names.some((n) => runs.some((r) => (r.metrics[n] || []).some((v) => v > 0))), plot: null };

  function draw() {
    const zoom = state.plot && state.plot.scales.x;
    state.plot?.destroy();
    const [steps, found] = linesOf(runs, names);
    const fit = (ys) => (state.log ? ys.map((y) => (y > 0 ? y : null)) : ys);
    const data = [steps];
    const series = [{}];
    const bands = [];
    for (const line of found) {
      if (line.low) {
        data.push(fit(line.high), fit(line.low));
        series.push({ width: 0, points: { show: false } }, { width: 0, points: { show: false } });
        bands.push({ series: [series.length - 2, series.length - 1], fill: `${css(line.colour)}33` });
      }
      data.push(fit(line.values));
      line.index = series.length;
      series.push({ label: line.label, stroke: css(line.colour), width: 1.75, dash: line.dash, spanGaps: true, points: { show: line.values.filter((v) => v !== null).length < 40, size: 5 } });
    }
    const axis = { stroke: css('--quiet'), grid: { stroke: css('--line'), width: 1 }, ticks: { show: false }, font: '12px system-ui, sans-serif' };
    const show = (at) => values.replaceChildren(h('span', { class: 'quiet' }, at === null ? 'last' : `step ${whole(steps[at])}`),
      ...found.map((line) => h('span', { class: 'plot-line' }, lineMark(line), `${line.label} `, h('b', {}, number(at === null ? last(data[line.index]) : data[line.index][at])))));
    state.plot = new uPlot({
      width: Math.max(260, box.clientWidth || 420), height: 210, legend: { show: false }, series, bands,
      cursor: { sync: { key: 'dew' }, drag: { x: true, y: false }, points: { size: 7 } },
      scales: { x: { time: false }, y: state.log ? { distr: 3 } : {} },
      axes: [{ ...axis, size: 30 }, { ...axis, size: 56, values: (_, ticks) => ticks.map((v) => (v === null ? '' : number(v))) }],
      hooks: { setCursor: [(u) => show(u.cursor.idx ?? null)], draw: [(u) => marks(u, runs)] },
    }, data, box);
    show(null);
    if (zoom && curvesState.zoomed) state.plot.setScale('x', { min: zoom.min, max: zoom.max });
    const lastValues = found.map((line) => `${line.label} ${number(last(line.values))}`).join(', ');
    box.setAttribute('role', 'img');
    box.setAttribute('aria-label', `${title} over ${plural(steps.length, 'step')}; last values: ${lastValues}`);
  }
  logButton.addEventListener('click', () => {
    state.log = !state.log;
    logButton.setAttribute('aria-pressed', String(state.log));
    draw();
  });
  curvesState.plots.push({ draw, box, resize: () => state.plot?.setSize({ width: Math.max(260, box.clientWidth), height: 210 }) });
  return frame;
}

const last = (values) => { for (let i = values.length; i--;) if (values[i] !== null) return values[i]; return null; };

const lineMark = ({ colour, dash }) => s('svg', { class: 'line-mark', viewBox: '0 0 22 8', 'aria-hidden': 'true' },
  s('line', { x1: 0, x2: 22, y1: 4, y2: 4, 'stroke-dasharray': dash.join(' ') || null, '--stroke': `var(${colour})` }));

/** A dotted line where the run raised an alarm. */
function marks(u, runs) {
  const { ctx } = u;
  ctx.save();
  ctx.strokeStyle = css('--alarm');
  ctx.setLineDash([3, 4]);
  for (const { step } of runs.flatMap((run) => run.alarms)) {
    const x = u.valToPos(step, 'x', true);
    if (!(x >= u.bbox.left && x <= u.bbox.left + u.bbox.width)) continue;
    ctx.beginPath();
    ctx.moveTo(x, u.bbox.top);
    ctx.lineTo(x, u.bbox.top + u.bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

function curves(report) {
  const { runs } = report;
  curvesState.plots = [];
  const all = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].filter((name) => name !== 'step' && name !== 'time');
  if (!all.length) return h('div', { class: 'page' }, h('p', { class: 'calm' }, 'This run recorded no metrics, so there are no curves.'));
  const used = new Set();
  const main = CHARTS.flatMap(([title, pattern, note, log]) => {
    const names = all.filter((name) => pattern.test(name));
    names.forEach((name) => used.add(name));
    return names.length ? [chart(runs, title, names, note, log)] : [];
  });
  const rest = all.filter((name) => !used.has(name));
  const more = h('details', { class: 'more', ontoggle: () => redraw() }, h('summary', {}, `Other metrics (${rest.length})`),
    h('div', { class: 'charts' }, rest.map((name) => chart(runs, name, [name], ''))));
  const redraw = () => curvesState.plots.forEach(({ draw, box }) => { if (box.offsetParent) draw(); });
  const seeds = seedSets(runs).some((set) => set.length > 1);
  const controls = h('div', { class: 'controls' },
    h('label', { class: 'choice' }, h('span', {}, 'Smoothing'), h('input', { type: 'range', min: 0, max: 0.98, step: 0.02, value: 0, id: 'smooth', oninput: (e) => { curvesState.smooth = Number(e.target.value); redraw(); } })),
    seeds && choice('Seeds', [['each', 'each run'], ['merge', 'mean ± standard deviation']], 'each', (v) => { curvesState.merge = v === 'merge'; redraw(); }),
    runs.length > 1 && h('div', { class: 'run-key' }, runs.map((run, r) => h('span', {}, runMark(r), visible(run.name)))),
    h('span', { class: 'quiet' }, 'Drag to zoom, double-click to go back. Dotted upright lines are alarms.'));
  const view = h('div', { class: 'page wide' }, controls, h('div', { class: 'charts' }, main), rest.length ? more : null);
  view.shown = redraw;
  view.addEventListener('dblclick', () => { curvesState.zoomed = false; });
  view.addEventListener('mouseup', () => { curvesState.zoomed = true; });
  window.addEventListener('resize', () => curvesState.plots.forEach((p) => { if (p.box.offsetParent) p.resize(); }));
  return view;
}
