// The token under the pointer, or the one that is kept: its credit in the panel.

function placeOf(target) {
  const token = target.closest('.t');
  const row = token?.closest('[data-i]');
  return row ? { i: Number(row.dataset.i), t: Number(token.dataset.t) } : null;
}

function tell(place) {
  const { panel } = view.parts;
  panel.classList.toggle('open', Boolean(place));
  const close = h('button.small.close', { 'aria-label': 'Close', onclick: () => pin(null) }, '✕');
  const hint = 'Point at a token to see the formula with its numbers. Click to keep it; the arrow keys then move on.';
  if (place) refill(panel, close, derivation(view.group, place.i, place.t));
  else refill(panel, h('h3', 'How the credit was computed'), h('p.quiet', hint));
}

/** Mark the kept token, and scroll until it is in sight. */
function markPinned(scrolls = false) {
  for (const old of view.parts.group.querySelectorAll('.pinned')) old.classList.remove('pinned');
  if (!view.pinned) return;
  const { i, t } = view.pinned;
  cardOf(i)?.reach(t);
  const place = `[data-i="${cardOf(i)?.places[0] ?? i}"] .t[data-t="${t}"]`;
  const tokens = view.parts.group.querySelectorAll(place);
  for (const token of tokens) token.classList.add('pinned');
  if (scrolls) tokens[0]?.scrollIntoView({ block: 'nearest', inline: 'nearest' });
}

/** The card that shows answer i: identical answers share one. */
const cardOf = (i) => [...view.parts.body.querySelectorAll('.answer[data-i]')].find(({ places }) => places.includes(i));

function pin(place) {
  if (place && !view.group.answers[place.i]?.tokens.length) return;
  view.pinned = place;
  set({ token: place ? `${place.i + 1}.${place.t + 1}` : '' });
  tell(place);
  markPinned(true);
}

/** Move the kept token along its answer (dt) or to another answer at the same position (di). */
function movePin(dt, di) {
  const { group, pinned } = view;
  const order = folded(group).map(([i]) => i);
  const at = order.indexOf(cardOf(pinned.i)?.places[0] ?? pinned.i) + di;
  const i = order[Math.min(order.length - 1, Math.max(0, at))] ?? pinned.i;
  pin({ i, t: Math.min(group.answers[i].tokens.length - 1, Math.max(0, pinned.t + dt)) });
}

/** Pin the next flipped token: of this group, else of the next ones in the table. */
async function nextFlip() {
  const all = listed();
  const from = Math.max(0, all.findIndex(({ n }) => n === view.place.n));
  for (let k = 0; k <= all.length; k++) {
    const place = all[(from + k) % all.length];
    if (!place?.head.flipped) continue;
    const { answers } = await groupAt(place.n);
    const ofAnswer = (answer, i) =>
      [...answer.tokens.keys()].filter((t) => isFlipped(answer, t)).map((t) => `${i + 1}.${t + 1}`);
    const flips = answers.flatMap(ofAnswer);
    const token = flips[k ? 0 : flips.indexOf(state.token) + 1];
    if (token) return void (location.hash = `${addressOf(place)}&token=${token}`);
  }
}

const isWide = () => window.matchMedia('(min-width: 60rem)').matches;

/** While no token is kept, the panel follows the pointer. */
function watchTokens({ group }) {
  group.addEventListener('mousemove', (event) => {
    const place = placeOf(event.target);
    if (!place || view.pinned || !isWide() || (place.i === view.hovered?.i && place.t === view.hovered.t)) return;
    view.hovered = place;
    tell(place);
  });
  group.addEventListener('click', (event) => {
    const place = placeOf(event.target);
    if (place) pin(place);
  });
}
