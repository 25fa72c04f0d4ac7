// Figures: a title, downloads, and a drawing that is made when it comes into sight.

const SLICE = 12; // milliseconds of work before the page is painted

/** `draw` fills the box, again when `look` (what the drawing depends on) has changed. */
function figure(title, note, rows, draw, { names = '', tools, above, key, look = () => 'drawn' } = {}) {
  const box = h('div.plot');
  const redraw = () => {
    frame.drawn = look();
    draw(box, frame.inner || box.clientWidth);
  };
  const picture = async () => {
    if (frame.waits()) await redraw();
    return box.querySelector('canvas, svg');
  };
  const buttons = h('span.buttons', tools, saveButtons(title, rows, picture));
  const caption = h('figcaption', h('span', h('strong', title), ' ', quiet(note)), buttons);
  const frame = h('figure.chart', { 'data-metrics': names }, caption, above, box, key && h('div.key', key));
  return Object.assign(frame, { redraw, waits: () => frame.drawn !== look() });
}

const figures = () => [...document.querySelectorAll('main > section:not([hidden]) :is(figure, .answer, .row)')];

/** Draw what is in sight: the first ones at once, others after the page has been painted; then all `later` ones. */
async function drawVisible() {
  const end = performance.now() + SLICE;
  const all = figures().filter((frame) => frame.waits());
  const seen = all.filter((frame) => {
    const { top, bottom, width } = frame.getBoundingClientRect(); // all are measured before one is drawn
    const inSight = width && bottom > 0 && top < window.innerHeight;
    if (inSight) frame.inner = frame.querySelector('.plot')?.clientWidth;
    return inSight;
  });
  const later = all.filter((frame) => frame.later && !seen.includes(frame));
  const waiting = seen.length ? seen : later;
  do await waiting.shift()?.redraw(); // uPlot draws in a microtask
  while (waiting.length && performance.now() < end);
  if (waiting.length || later.length) drawSoon();
}

async function drawSoon() {
  const main = byId('content');
  if (main.ariaBusy === 'true') return;
  main.ariaBusy = 'true';
  await idle();
  main.ariaBusy = 'false';
  drawVisible();
}

window.addEventListener('scroll', drawSoon, { passive: true });
window.addEventListener('resize', drawSoon);
window.addEventListener('beforeprint', () => {
  for (const frame of figures()) if (frame.waits() && frame.offsetParent) frame.redraw();
});
