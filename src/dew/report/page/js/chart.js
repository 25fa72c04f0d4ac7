// One chart: uPlot draws the lines; the numbers above them follow the pointer.

const WHOLE_STEPS = [0, 1, 2, 3, 4, 5, 6].flatMap((k) => [1, 2, 5].map((n) => n * 10 ** k));
const MANY_LINES = 4;
const HEIGHT = 210;
const NEAR = 30; // pixels from the pointer to a line

const last = (values) => {
  for (let i = values.length; i--; ) if (values[i] !== null) return values[i];
  return null;
};

/** The place of the logged value that is nearest to step number `at`. */
function nearest(values, at) {
  for (let away = 0; away < values.length; away++)
    for (const i of [at - away, at + away]) if (values[i] !== null && values[i] !== undefined) return i;
  return null;
}

const lineMark = ({ colour, dash }) =>
  s(
    'svg',
    { class: 'line-mark', viewBox: '0 0 22 8', 'aria-hidden': 'true' },
    s('line', { x1: 0, x2: 22, y1: 4, y2: 4, 'stroke-dasharray': dash.join(' ') || null, '--stroke': `var(${colour})` }),
  );

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
    const left = x + ctx.measureText(name).width + 6 * pixel > u.bbox.left + u.bbox.width;
    ctx.textAlign = left ? 'right' : 'left';
    ctx.fillText(name, x + (left ? -4 : 4) * pixel, u.bbox.top + (10 + 13 * (k % 4)) * pixel);
  });
  ctx.restore();
}

function chartCsv(runs, names) {
  const rows = runs.flatMap((run, r) =>
    (run.metrics.step || []).map((step, i) => [run.name, arms()[armOf(r)].label, step, ...names.map((n) => run.metrics[n]?.[i])]),
  );
  return [['run', 'arm', 'step', ...names], ...rows];
}

function chart(runs, title, names, note, log) {
  const box = h('div', { class: 'plot' });
  const values = h('div', { class: 'plot-lines' });
  const chartState = { log: false, plot: null, drawn: false, width: 0 };
  const logButton = h(
    'button',
    {
      class: 'small',
      'aria-pressed': 'false',
      title: 'Logarithmic axis',
      onclick: () => {
        chartState.log = !chartState.log;
        draw();
      },
    },
    'log',
  );
  const canvas = () => {
    if (!chartState.drawn) draw();
    return box.querySelector('canvas');
  };
  const frame = h(
    'figure',
    { class: 'chart', 'data-metrics': names.join(' ') },
    h(
      'figcaption',
      {},
      h('span', {}, h('strong', {}, title), ' ', h('span', { class: 'quiet' }, note)),
      h('span', { class: 'buttons' }, logButton, saveButtons(title, () => chartCsv(runs, names), canvas)),
    ),
    values,
    box,
  );
  chartState.log = Boolean(log) && names.some((n) => runs.some((r) => (r.metrics[n] || []).some((v) => v > 0)));

  function draw() {
    const zoom = chartState.plot && chartState.plot.scales.x;
    chartState.plot?.destroy();
    chartState.drawn = true;
    logButton.setAttribute('aria-pressed', String(chartState.log));
    const [steps, found] = linesOf(runs, names);
    const fit = (ys) => (chartState.log ? ys.map((y) => (y > 0 ? y : null)) : ys);
    const data = [steps];
    const series = [{}];
    const bands = [];
    for (const line of found) {
      if (line.low) {
        data.push(fit(line.high), fit(line.low));
        const edge = { width: 0, spanGaps: true, points: { show: false } };
        series.push({ ...edge }, { ...edge });
        bands.push({ series: [series.length - 2, series.length - 1], fill: `${css(line.colour)}33` });
      }
      if (line.values !== line.raw && !line.low && found.length <= 2 * MANY_LINES) {
        data.push(fit(line.raw));
        series.push({ stroke: `${css(line.colour)}40`, width: 1, spanGaps: true, points: { show: false } });
      }
      data.push(fit(line.values));
      line.index = series.length;
      series.push({
        label: line.label,
        stroke: css(line.colour),
        width: 1.75,
        dash: line.dash,
        spanGaps: true,
        points: { show: line.values.filter((v) => v !== null).length < 40, size: 5 },
      });
    }
    const axis = {
      stroke: css('--quiet'),
      grid: { stroke: css('--line'), width: 1 },
      ticks: { show: false },
      font: '12px system-ui, sans-serif',
    };
    let near = null; // the line nearest to the pointer
    const metrics = found.length > MANY_LINES && names.length > 1 ? names : [];
    const key = metrics.map((name, d) =>
      h('span', { class: 'plot-key' }, lineMark({ colour: '--quiet', dash: DASHES[d % DASHES.length] }), visible(name.split('/').pop())),
    );
    const show = (at) => {
      const chosen = found.length <= MANY_LINES ? found : found.filter((line) => line === near);
      values.replaceChildren(
        h('span', { class: 'quiet' }, at === null ? 'last' : `step ${whole(steps[at])}`),
        ...(chosen.length || !found.length ? [] : [...key, h('span', { class: 'quiet' }, `${found.length} lines: point at one`)]),
        ...chosen.map((line) => {
          const i = at === null ? null : nearest(line.raw, at);
          const off = i !== null && i !== at ? ` (step ${whole(steps[i])})` : '';
          return h(
            'span',
            { class: 'plot-line' },
            lineMark(line),
            `${visible(line.label)} `,
            h('b', {}, number(at === null ? last(line.raw) : i === null ? null : line.raw[i])),
            off && h('span', { class: 'quiet' }, off),
          );
        }),
      );
    };
    const point = (u) => {
      const at = u.cursor.idx ?? null;
      const away = (line) => {
        const i = nearest(line.values, at);
        return i === null ? Infinity : Math.abs(u.valToPos(line.values[i], 'y') - u.cursor.top);
      };
      const before = near;
      near = null;
      let least = NEAR;
      for (const line of at !== null && u.cursor.event ? found : []) {
        const distance = away(line); // without an event, the pointer is over another chart
        if (distance <= least) [near, least] = [line, distance];
      }
      if (near !== before && found.length > 1) u.setSeries(near ? near.index : null, { focus: true });
      show(at);
    };
    chartState.plot = new uPlot(
      {
        width: Math.max(260, chartState.width || box.clientWidth || 420),
        height: HEIGHT,
        legend: { show: false },
        series,
        bands,
        focus: { alpha: 0.3 },
        cursor: { sync: { key: 'dew' }, drag: { x: true, y: false }, points: found.length > MANY_LINES ? { show: false } : { size: 7 } },
        scales: {
          x: { time: false },
          y: chartState.log ? { distr: 3 } : names.every((n) => shares(n) && !n.startsWith('clip/')) ? { range: [0, 1] } : {},
        },
        axes: [
          { ...axis, size: 30, incrs: WHOLE_STEPS },
          { ...axis, size: 56, values: (_, ticks) => ticks.map((v) => (v === null ? '' : number(v))) },
        ],
        hooks: { setCursor: [point], draw: [(u) => marks(u, runs)] },
      },
      data,
      box,
    );
    show(null);
    if (zoom && curvesState.zoomed) chartState.plot.setScale('x', { min: zoom.min, max: zoom.max });
    const lastValues = found.slice(0, 12).map((line) => `${line.label} ${number(last(line.raw))}`);
    box.setAttribute('role', 'img');
    box.setAttribute('aria-label', `${title} over ${plural(steps.length, 'step')}; last values: ${lastValues.join(', ')}`);
  }
  curvesState.plots.push({
    frame,
    close: () => chartState.plot?.destroy(),
    stale: () => {
      chartState.drawn = false;
    },
    waits: () => {
      const { top, bottom, width } = frame.getBoundingClientRect();
      chartState.width = box.clientWidth; // measured for all charts before one is drawn, which changes the layout
      return !chartState.drawn && width && bottom > 0 && top < window.innerHeight;
    },
    canvas,
    resize: () => box.offsetParent && chartState.plot?.setSize({ width: Math.max(260, box.clientWidth), height: HEIGHT }),
  });
  return frame;
}
