// One chart: uPlot draws the lines; the numbers above them follow the pointer.

const WHOLE_STEPS = [0, 1, 2, 3, 4, 5, 6].flatMap((k) => [1, 2, 5].map((n) => n * 10 ** k));

const last = (values) => {
  for (let i = values.length; i--;) if (values[i] !== null) return values[i];
  return null;
};

const lineMark = ({ colour, dash }) =>
  s(
    'svg',
    { class: 'line-mark', viewBox: '0 0 22 8', 'aria-hidden': 'true' },
    s('line', {
      x1: 0,
      x2: 22,
      y1: 4,
      y2: 4,
      'stroke-dasharray': dash.join(' ') || null,
      '--stroke': `var(${colour})`,
    }),
  );

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

function chart(runs, title, names, note, log) {
  const box = h('div', { class: 'plot' });
  const values = h('div', { class: 'plot-lines' });
  const logButton = h(
    'button',
    { class: 'small', 'aria-pressed': String(Boolean(log)), title: 'Logarithmic axis' },
    'log',
  );
  const frame = h(
    'figure',
    { class: 'chart' },
    h('figcaption', {}, h('span', {}, h('strong', {}, title), ' ', h('span', { class: 'quiet' }, note)), logButton),
    values,
    box,
  );
  const state = {
    log: Boolean(log) && names.some((n) => runs.some((r) => (r.metrics[n] || []).some((v) => v > 0))),
    plot: null,
  };

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
        const edge = { width: 0, spanGaps: true, points: { show: false } };
        series.push({ ...edge }, { ...edge });
        bands.push({ series: [series.length - 2, series.length - 1], fill: `${css(line.colour)}33` });
      }
      if (line.values !== line.raw && !line.low) {
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
    const show = (at) =>
      values.replaceChildren(
        h('span', { class: 'quiet' }, at === null ? 'last' : `step ${whole(steps[at])}`),
        ...found.map((line) =>
          h(
            'span',
            { class: 'plot-line' },
            lineMark(line),
            `${line.label} `,
            h('b', {}, number(at === null ? last(line.raw) : line.raw[at])),
          ),
        ),
      );
    state.plot = new uPlot(
      {
        width: Math.max(260, box.clientWidth || 420),
        height: 210,
        legend: { show: false },
        series,
        bands,
        cursor: { sync: { key: 'dew' }, drag: { x: true, y: false }, points: { size: 7 } },
        scales: { x: { time: false }, y: state.log ? { distr: 3 } : {} },
        axes: [
          { ...axis, size: 30, incrs: WHOLE_STEPS },
          { ...axis, size: 56, values: (_, ticks) => ticks.map((v) => (v === null ? '' : number(v))) },
        ],
        hooks: { setCursor: [(u) => show(u.cursor.idx ?? null)], draw: [(u) => marks(u, runs)] },
      },
      data,
      box,
    );
    show(null);
    if (zoom && curvesState.zoomed) state.plot.setScale('x', { min: zoom.min, max: zoom.max });
    const lastValues = found.map((line) => `${line.label} ${number(last(line.raw))}`).join(', ');
    box.setAttribute('role', 'img');
    box.setAttribute('aria-label', `${title} over ${plural(steps.length, 'step')}; last values: ${lastValues}`);
  }
  logButton.addEventListener('click', () => {
    state.log = !state.log;
    logButton.setAttribute('aria-pressed', String(state.log));
    draw();
  });
  curvesState.plots.push({
    draw,
    box,
    resize: () => box.offsetParent && state.plot?.setSize({ width: Math.max(260, box.clientWidth), height: 210 }),
  });
  return frame;
}
