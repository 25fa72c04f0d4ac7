// Elements are made here and nowhere else. Text becomes text nodes, so no answer can turn into markup.

const isKnown = (x) => x !== null && x !== undefined;
const known = (list) => list.filter(isKnown);
const shownParts = (children) => known(children.flat(Infinity)).filter((child) => child !== false);

/** `parts`: an object of attributes, which may be left out, then children. Classes follow the tag, as in 'p.quiet'. */
function create(namespace, name, parts) {
  const [tag, ...classes] = name.split('.');
  const element = document.createElementNS(namespace, tag);
  if (classes.length) element.setAttribute('class', classes.join(' '));
  const attributes = parts[0]?.constructor === Object ? parts.shift() : {};
  for (const [key, value] of Object.entries(attributes)) {
    if (!isKnown(value) || value === false) continue;
    if (key.startsWith('on')) element.addEventListener(key.slice(2), value);
    else if (key.startsWith('--')) element.style.setProperty(key, value);
    else element.setAttribute(key, value === true ? '' : value);
  }
  element.append(...shownParts(parts));
  return element;
}

const h = (name, ...parts) => create('http://www.w3.org/1999/xhtml', name, parts);
const s = (name, ...parts) => create('http://www.w3.org/2000/svg', name, parts);
const byId = (id) => document.getElementById(id);
const refill = (element, ...children) => element.replaceChildren(...shownParts(children));

/** Until the browser has nothing else to do, where it can tell, or for a tenth of a second. */
const idle = () => new Promise((done) => (window.requestIdleCallback || setTimeout)(done, { timeout: 100 }));

const plural = (n, word) => `${whole(n)} ${word}${n === 1 ? '' : 's'}`;
const grouped = new Intl.NumberFormat('en-US'); // made once: toLocaleString makes one per call
const whole = (n) => grouped.format(Math.round(n));
const percent = (x, digits = 0) => `${minus((100 * x).toFixed(digits))}%`;
const minus = (text) => String(text).replace('-', '−');

/** Four significant digits with a real minus sign; an en dash where there is no number. */
function number(x) {
  if (!isKnown(x) || Number.isNaN(x)) return '–';
  if (x === 0) return '0';
  const size = Math.abs(x);
  if (size >= 1e6 || size < 1e-4) return minus(x.toExponential(2));
  return minus(String(Number(x.toPrecision(4))));
}

const short = (x) => number(Number(x.toPrecision(3)));
const signed = (x, show = number) => (x > 0 ? '+' : '') + show(x);

const quiet = (...text) => h('span.quiet', text);

/** A part of the page that the keyboard can scroll. */
const region = (name, label, ...children) => h(name, { tabindex: 0, role: 'region', 'aria-label': label }, children);

const labelled = (label, control) => h('label.choice', h('span', label), control);

/** A labelled list to choose from; options are {value: text}, or pairs of them. */
function choice(label, options, value, onchange) {
  const pairs = Array.isArray(options) ? options : Object.entries(options);
  const list = pairs.map(([key, text]) => h('option', { value: key, selected: key === value }, text));
  return labelled(label, h('select', { onchange: (event) => onchange(event.target.value) }, list));
}

/** A table of rows of cells, the first of each a heading unless it is made as a cell; without `head`, only its body. */
function table(name, head, rows) {
  const cell = (content, scope) =>
    content instanceof HTMLTableCellElement ? content : h(scope ? 'th' : 'td', { scope }, content);
  const heads = head && h('thead', h('tr', head.map((text) => cell(text, 'col'))));
  const row = (cells) => h('tr', cells.map((content, k) => cell(content, k ? null : 'row')));
  return h('table', { class: name }, heads, h('tbody', rows.map(row)));
}
