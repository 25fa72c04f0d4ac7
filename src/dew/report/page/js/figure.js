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

const figures = () => [...document.querySelectorAll('main > section:not([hidden]) figure')];

/** Draw the figures in sight: the first ones at once, the others after the page has been painted. */
async function drawVisible() {
  const end = performance.now() + SLICE;
  const waiting = figures().filter((frame) => {
    if (!frame.waits()) return false;
    const { top, bottom, width } = frame.getBoundingClientRect(); // all are measured before one is drawn
    const inSight = width && bottom > 0 && top < window.innerHeight;
    if (inSight) frame.inner = frame.querySelector('.plot').clientWidth;
    return inSight;
  });
  do await waiting.shift()?.redraw(); // uPlot draws in a microtask
  while (waiting.length && performance.now() < end);
  const main = byId('content');
  if (!waiting.length || main.ariaBusy === 'true') return;
  main.ariaBusy = 'true';
  await painted();
  main.ariaBusy = 'false';
  drawVisible();
}

window.addEventListener('scroll', drawVisible, { passive: true });
window.addEventListener('resize', drawVisible);
window.addEventListener('beforeprint', () => {
  for (const frame of figures()) if (frame.waits() && frame.offsetParent) frame.redraw();
});
