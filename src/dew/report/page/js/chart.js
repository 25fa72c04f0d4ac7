// One chart: uPlot draws the lines; the numbers above them follow the pointer.

const WHOLE_STEPS = [0, 1, 2, 3, 4, 5, 6].flatMap((k) => [1, 2, 5].map((n) => n * 10 ** k));
const MANY_LINES = 4;
const shareAxis = (_, low, high) => [0, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8].find((x) => high <= x) ?? 1];
const NEAR = 30; // pixels from the pointer to a line

const last = (values) => values.findLast(isKnown);

/** The place of the logged value that is nearest to step number `at`. */
function nearest(values, at) {
  for (let away = 0; away < values.length; away++)
    for (const i of [at - away, at + away]) if (isKnown(values[i])) return i;
  return null;
}

const lineMark = ({ colour, dash, shape }) =>
  s('svg.line-mark', { viewBox: '0 0 22 8', 'aria-hidden': 'true', '--mark': `var(${colour})` },
    s('line', { x1: 0, x2: 22, y1: 4, y2: 4, 'stroke-dasharray': dash.join(' ') || null }),
    shape && s('polygon', { points: shape.map(([x, y]) => [7 + 8 * x, 8 * y]).join(' ') }),
  );

/** A line's name and its logged value nearest to step number `at`, or the last one. */
function lineValue(line, steps, at) {
  const i = at === null ? line.raw.findLastIndex(isKnown) : nearest(line.raw, at);
  const elsewhere = at !== null && i !== null && i !== at && quiet(` (step ${whole(steps[i])})`);
  return h('span.plot-line', lineMark(line), `${visible(line.label)} `, h('b', number(line.raw[i])), elsewhere);
}

/** A dotted, named line where a run first raised an alarm. */
function marks(u, runs) {
  const { ctx } = u;
  const hidden = hiddenRuns();
  const first = new Map();
  runs.forEach((run, r) => {
    if (!hidden.has(r)) for (const { alarm, step } of run.alarms) if (!first.has(alarm)) first.set(alarm, step);
  });
  const pixel = window.devicePixelRatio;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = css('--alarm');
  ctx.setLineDash([3 * pixel, 4 * pixel]);
  ctx.font = `${11 * pixel}px system-ui, sans-serif`;
  [...first].forEach(([alarm, step], k) => {
    const x = u.valToPos(step, 'x', true);
    if (!(x >= u.bbox.left && x <= u.bbox.left + u.bbox.width)) return;
    ctx.beginPath();
    ctx.moveTo(x, u.bbox.top);
    ctx.lineTo(x, u.bbox.top + u.bbox.height);
    ctx.stroke();
    const name = visible(String(alarm)).replace(/_/g, ' ').slice(0, 30);
    const isLate = x > u.bbox.left + u.bbox.width / 2; // its name is on the left
    ctx.textAlign = isLate ? 'right' : 'left';
    ctx.fillText(name, x + (isLate ? -4 : 4) * pixel, u.bbox.top + (10 + 13 * (k % 4)) * pixel);
  });
  ctx.restore();
}

function chartCsv(runs, names) {
  const values = ({ metrics }, i) => names.map((name) => metrics[name]?.[i]);
  const rows = runs.flatMap((run, r) =>
    (run.metrics.step || []).map((step, i) => [run.name, arms()[armOf(r)].label, step, ...values(run, i)]),
  );
  return [['run', 'arm', 'step', ...names], ...rows];
}

/** The shapes that tell lines of one colour apart, at different places of each line. */
function drawShapes(u, steps, found, near) {
  const { ctx, bbox } = u;
  const pixel = window.devicePixelRatio;
  found.forEach((line, k) => {
    if (!line.shape || (near.length && !near.includes(line))) return;
    ctx.fillStyle = css(line.colour);
    for (let x = bbox.left + (12 + ((17 * k) % 50)) * pixel; x < bbox.left + bbox.width; x += 60 * pixel) {
      const i = nearest(line.values, u.posToIdx((x - bbox.left) / pixel));
      if (i === null) return;
      const [left, top] = [u.valToPos(steps[i], 'x', true), u.valToPos(line.values[i], 'y', true)];
      if (left < bbox.left || left > bbox.left + bbox.width) continue; // zoomed
      ctx.beginPath();
      for (const [a, b] of line.shape) ctx.lineTo(left + (a - 0.5) * 8 * pixel, top + (b - 0.5) * 8 * pixel);
      ctx.fill();
    }
  });
}

/** uPlot's columns, series and bands: each line, above its logged values if there are few lines, in its band. */
function plotSeries(steps, found, isLog, hasBand) {
  const [data, series, bands] = [[steps], [{}], []];
  const add = (ys, look) => {
    data.push(isLog ? ys.map((y) => (y > 0 ? y : null)) : ys);
    return series.push({ spanGaps: true, points: { show: false }, ...look }) - 1;
  };
  for (const line of found) {
    const stroke = css(line.colour);
    const faint = line.values !== line.raw && !line.low && found.length <= 2 * MANY_LINES;
    if (faint) add(line.raw, { stroke: `${stroke}40`, width: 1 });
    if (line.low) {
      const edges = [line.high, line.low].map((ys) => add(ys, { width: 0 }));
      bands.push({ series: edges, fill: () => (hasBand(line) ? `${stroke}33` : null) });
    }
    const points = { show: known(line.values).length < 40, size: 5 };
    line.index = add(line.values, { label: line.label, stroke, width: 1.75, dash: line.dash, points });
  }
  return { data, series, bands };
}

function plotOptions(width, y, many) {
  const grid = { stroke: css('--line'), width: 1 };
  const axis = { stroke: css('--quiet'), grid, ticks: { show: false }, font: '12px system-ui, sans-serif' };
  return {
    width: Math.max(260, width || 420),
    height: 210,
    legend: { show: false },
    cursor: { sync: { key: 'dew' }, drag: { x: true, y: false }, points: many ? { show: false } : { size: 7 } },
    scales: { x: { time: false }, y },
    axes: [
      { ...axis, size: 30, incrs: WHOLE_STEPS },
      { ...axis, size: 56, values: (_, ticks) => ticks.map((v) => (v === null ? '' : number(v).replace(/\.?0+e/, 'e'))) },
    ],
  };
}

/** The line nearest to the pointer, in a list; none if the pointer is far, or over another chart. */
function pointedAt(u, found) {
  if (!isKnown(u.cursor.idx) || !u.cursor.event) return [];
  let [nearby, least] = [[], NEAR];
  for (const line of found) {
    const i = nearest(line.values, u.cursor.idx);
    const distance = i === null ? Infinity : Math.abs(u.valToPos(line.values[i], 'y') - u.cursor.top);
    if (distance <= least) [nearby, least] = [[line], distance];
  }
  return nearby;
}

function chart(runs, title, names, note, log) {
  let plot = null;
  let isLog = Boolean(log) && names.some((n) => runs.some((r) => (r.metrics[n] || []).some((v) => v > 0)));
  const numbers = h('div.plot-lines');
  const turn = () => {
    isLog = !isLog;
    frame.redraw();
  };
  const logButton = h('button.small', { title: 'Logarithmic axis', onclick: turn }, 'log');
  const parts = { names: names.join(' '), tools: logButton, above: numbers, look: curvesLook };
  const frame = figure(title, note, () => chartCsv(runs, names), draw, parts);
  const areShares = names.every((n) => shares(n) && !n.startsWith('clip/'));

  function draw(box, width) {
    const zoom = plot?.scales.x;
    plot?.destroy();
    const log = isLog && !isDifference(); // differences have both signs
    logButton.hidden = isDifference();
    logButton.setAttribute('aria-pressed', String(log));
    const [steps, found] = linesOf(runs, names);
    const many = found.length > MANY_LINES;
    const unnamed = quiet(`${found.length} lines: point at one`);
    let near = []; // the lines that are pointed at
    const { data, ...lines } = plotSeries(steps, found, log, (line) => (near.length ? near.includes(line) : !many));
    const show = (at) => {
      const when = quiet(at === null ? 'last' : `step ${whole(steps[at])}`);
      const chosen = many ? near : found;
      refill(numbers, when, many && !near.length ? unnamed : chosen.map((line) => lineValue(line, steps, at)));
    };
    const focus = (lines) => {
      if (found.length < 2 || String(lines.map((l) => l.index)) === String(near.map((l) => l.index))) return;
      near = lines;
      for (const line of found) plot.series[line.index].alpha = !near.length || near.includes(line) ? 1 : 0.25;
      plot.redraw(false);
    };
    const point = (u) => {
      focus(isKnown(u.cursor.idx) ? pointedAt(u, found) : found.filter((l) => pointedRuns.includes(l.members[0])));
      show(u.cursor.idx ?? null);
    };
    const y = log ? { distr: 3 } : areShares && !isDifference() ? { range: shareAxis } : {};
    const paint = (u) => [drawShapes(u, steps, found, near), marks(u, runs)];
    const hooks = { setCursor: [point], draw: [paint] };
    plot = new uPlot({ ...plotOptions(width, y, many), ...lines, hooks }, data, box);
    show(null);
    if (zoom && (zoom.min > steps[0] || zoom.max < last(steps))) plot.setScale('x', { min: zoom.min, max: zoom.max });
    const values = found.slice(0, 12).map((line) => `${line.label} ${number(last(line.raw))}`).join(', ');
    box.setAttribute('role', 'img');
    box.setAttribute('aria-label', `${title} over ${plural(steps.length, 'step')}; last values: ${values}`);
    frame.highlight = (members) => {
      focus(found.filter((line) => members.includes(line.members[0])));
      show(null);
    };
  }
  frame.close = () => plot?.destroy();
  return frame;
}
