// Downloads: tables as CSV, charts as PNG.

function download(name, blob) {
  const link = h('a', { href: URL.createObjectURL(blob), download: name.replace(/[^\w.@-]+/g, '-') });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** A cell of text cannot start a formula in a spreadsheet. */
const cell = (value) => {
  if (!isKnown(value)) return '';
  const text = typeof value === 'string' && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
};

/** An image of an SVG with the style sheet of the page. */
async function svgImage(svg, width, height) {
  const copy = svg.cloneNode(true);
  const look = { width, height, 'data-theme': isDark() ? 'dark' : 'light', 'font-family': 'system-ui, sans-serif' };
  for (const [name, value] of Object.entries(look)) copy.setAttribute(name, value);
  copy.prepend(s('style', document.querySelector('style').textContent));
  const image = new Image();
  image.src = `data:image/svg+xml,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  await image.decode();
  return image;
}

/** The chart with its title on the page's background. */
async function savePng(title, drawing) {
  const { width, height } = drawing.getBoundingClientRect();
  const image = drawing instanceof HTMLCanvasElement ? drawing : await svgImage(drawing, width, height);
  const canvas = h('canvas', { width: 2 * (width + 20), height: 2 * (height + 40) });
  const pen = canvas.getContext('2d');
  pen.scale(2, 2);
  pen.fillStyle = css('--card');
  pen.fillRect(0, 0, width + 20, height + 40);
  pen.fillStyle = css('--ink');
  pen.font = '600 14px system-ui, sans-serif';
  pen.fillText(title, 10, 22);
  pen.drawImage(image, 10, 32, width, height);
  canvas.toBlob((blob) => download(`${title}.png`, blob));
}

/** Buttons for a figure: `rows` gives the table, `drawing` the canvas or SVG. */
function saveButtons(name, rows, drawing) {
  const lines = () => rows().map((row) => `${row.map(cell).join(',')}\n`);
  const csv = () => download(`${name}.csv`, new Blob(lines(), { type: 'text/csv' }));
  const png = async () => savePng(name, await drawing());
  return [
    h('button.small', { title: 'Download the numbers', onclick: csv }, 'CSV'),
    drawing && h('button.small', { title: 'Download a picture', onclick: png }, 'PNG'),
  ];
}
