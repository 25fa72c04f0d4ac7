// Elements are made here and nowhere else. Text becomes text nodes, so no answer can turn into markup.

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name.startsWith('--')) element.style.setProperty(name, value);
    else if (name === 'value' && 'step' in element)
      continue; // set below, once min, max and step are known
    else element.setAttribute(name, value === true ? '' : value);
  }
  if ('value' in attributes && 'step' in element) element.value = attributes.value;
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/** Other children in place of those that it has. */
function refill(element, ...children) {
  element.replaceChildren();
  return fill(element, {}, children);
}

const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);

/** Until the page has painted what was changed. */
const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));

const plural = (n, word) => `${whole(n)} ${word}${n === 1 ? '' : 's'}`;
const grouped = new Intl.NumberFormat('en-US'); // made once: toLocaleString makes one per call
const whole = (n) => grouped.format(Math.round(n));
const percent = (x, digits = 0) => `${minus((100 * x).toFixed(digits))} %`;
const minus = (text) => String(text).replace('-', '−');

/** Four significant digits with a real minus sign; an en dash where there is no number. */
function number(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return '–';
  if (x === 0) return '0';
  const size = Math.abs(x);
  if (size >= 1e6 || size < 1e-4) return minus(x.toExponential(2));
  return minus(String(Number(x.toPrecision(4))));
}

const signed = (x) => (x > 0 ? '+' : '') + number(x);

const quiet = (...text) => h('span', { class: 'quiet' }, text);
const calm = (...text) => h('p', { class: 'calm' }, text);

/** A labelled list to choose from; options are {value: text}, or pairs of them. */
function choice(label, options, value, onchange) {
  const pairs = Array.isArray(options) ? options : Object.entries(options);
  const list = pairs.map(([key, text]) => h('option', { value: key, selected: key === value }, text));
  const select = h('select', { onchange: (event) => onchange(event.target.value) }, list);
  return h('label', { class: 'choice' }, h('span', {}, label), select);
}

/** A table of rows of cells, the first of each a heading unless it is made as a cell; without `head`, only its body. */
function table(name, head, rows) {
  const cell = (content, scope) =>
    content instanceof HTMLTableCellElement ? content : h(scope ? 'th' : 'td', { scope }, content);
  const heads = head && h('thead', {}, h('tr', {}, head.map((text) => cell(text, 'col'))));
  const row = (cells) => h('tr', {}, cells.map((content, k) => cell(content, k ? null : 'row')));
  return h('table', { class: name }, heads, h('tbody', {}, rows.map(row)));
}
