// What GTPO compares: the same position across answers, one column each.

const SURE = 0.01;

/** The entropies at one position of the answers that still run there. */
const entropiesAt = (answers, t) => known(answers.map((answer) => (answer.live[t] ? answer.entropy?.[t] : null)));

/** Whether the policy was certain everywhere at this position: weights there compare rounding noise. */
function isSure({ answers }, t) {
  const values = entropiesAt(answers, t);
  return values.length > 0 && values.every((H) => H < SURE);
}

/** How many answers of one outcome still run at each position, and the mean of what is compared there. */
function sideRow(group, places, correct) {
  const own = group.answers.filter((answer) => answer.correct === correct);
  const cell = (t) => {
    const alive = own.filter((answer) => answer.live[t]).length;
    const values = entropiesAt(own, t).map((H) => floored(H, null) ** (correct ? 1 : -1));
    return h('td', alive > 0 && [h('b', String(alive)), values.length > 0 && ` · ${short(mean(values))}`]);
  };
  const title = correct ? '✓ running · mean H' : '✗ running · mean 1/H';
  return h('tr.side', h('th', { scope: 'row' }, title), places.map(cell));
}

const columnCell = (answer, t) =>
  t < answer.tokens.length
    ? h('td', { class: tokenClass(answer, t, view.scale), 'data-t': t }, brief(answer.tokens[t]))
    : h('td.over');

function columnsView(group) {
  const longest = longestOf(group);
  const fit = Math.ceil(view.parts.body.clientWidth / 40); // a few more than are in sight
  const from = Math.min(view.column ?? view.pinned?.t ?? 0, longest - 1);
  const to = Math.min(longest, from + fit);
  const places = Array.from({ length: to - from }, (_, k) => from + k);
  const sures = new Set(places.filter((t) => isSure(group, t)));
  const order = orderOf(group).sort((a, b) => group.answers[b].correct - group.answers[a].correct);
  const turn = (t) => {
    view.column = Math.max(0, t);
    showGroup();
  };
  const onchange = ({ target }) => turn(Math.round(target.value) - 1);
  const first = h('input', { type: 'number', min: 1, max: longest, value: from + 1, onchange });
  const pages = h('div.controls',
    h('button.small', { disabled: from === 0, onclick: () => turn(from - fit) }, '‹ earlier'),
    labelled('positions', [first, quiet(`to ${whole(to)} of ${whole(longest)}`)]),
    h('button.small', { disabled: to >= longest, onclick: () => turn(to) }, 'later ›'),
  );
  const head = (t) => {
    const title = `every entropy at position ${t + 1} is below ${SURE} nats`;
    return h('th', { scope: 'col', ...(sures.has(t) && { class: 'sure', title }) }, String(t + 1));
  };
  const row = (answer, i) =>
    h(`tr.${sideClass(answer.correct)}`, { 'data-i': i },
      h('th', { scope: 'row' }, outcome(answer), ` #${i + 1}`),
      places.map((t) => columnCell(answer, t)),
    );
  const sides = [true, false].map((correct) => sideRow(group, places, correct));
  const grid = h('table.grid',
    h('thead', h('tr', h('th', 'position'), places.map(head)), sides),
    h('tbody', order.map((i) => row(group.answers[i], i))),
  );
  const note =
    'gtpo compares a token with those in its column that belong to answers of the same outcome (compare=column). ' +
    `Hatched: the entropy is below ${SURE} nats (of a position: every one), so weights there are rounding noise.`;
  const scroll = region('div.scroll-x', 'Answers by position', grid);
  return h('div.columns', longest > fit && pages, scroll, h('p.quiet', note));
}
