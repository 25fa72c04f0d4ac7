// The token under the pointer, and the one that is kept: its numbers in a tip, its derivation in the panel.

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

function markPinned() {
  for (const old of view.parts.group.querySelectorAll('.pinned')) old.classList.remove('pinned');
  if (!view.pinned) return;
  const place = `[data-i="${foldedInto(view.pinned.i)}"] .t[data-t="${view.pinned.t}"]`;
  for (const token of view.parts.group.querySelectorAll(place)) token.classList.add('pinned');
}

/** The answer under which answer i is shown: identical ones share a card. */
const foldedInto = (i) => folded(view.group).find((places) => places.includes(i))?.[0] ?? i;

function pin(place) {
  if (place && !view.group.answers[place.i]?.tokens.length) return;
  view.pinned = place;
  set({ token: place ? `${place.i + 1}.${place.t + 1}` : '' });
  markPinned();
  tell(place);
  view.parts.group.querySelector('.pinned')?.scrollIntoView({ block: 'nearest', inline: 'nearest' });
}

/** Move the kept token along its answer (dt) or to another answer at the same position (di). */
function movePin(dt, di) {
  const { group, pinned } = view;
  const order = folded(group).map(([i]) => i);
  const i = order[Math.min(order.length - 1, Math.max(0, order.indexOf(foldedInto(pinned.i)) + di))] ?? pinned.i;
  pin({ i, t: Math.min(group.answers[i].tokens.length - 1, Math.max(0, pinned.t + dt)) });
}

/** In the view of the three methods, what each of them gives to the token; else all that was recorded. */
function tipTable({ i, t }, target) {
  const answer = view.group.answers[i];
  if (!target.closest('.method')) return signalTable(answer, t);
  const settings = view.what || settingsOf(view.group);
  const given = (method) => number(advantages(view.group, method, settings)[i][t]);
  return table('signals', null, METHODS.map((method) => [method, given(method)]));
}

/** Beside the pointer, within the answers and the window. */
function moveTip({ tip, group }, { clientX: x, clientY: y }) {
  const { width, height } = tip.getBoundingClientRect();
  const { right } = group.getBoundingClientRect();
  tip.style.left = `${Math.max(4, x + 14 + width > right ? x - width - 10 : x + 14)}px`;
  tip.style.top = `${y + 22 + height > window.innerHeight ? Math.max(4, y - height - 14) : y + 22}px`;
}

const isWide = () => window.matchMedia('(min-width: 60rem)').matches;

function watchTokens({ group, tip }) {
  group.addEventListener('mousemove', (event) => {
    const place = placeOf(event.target);
    const isNew = place && (place.i !== view.hovered?.i || place.t !== view.hovered.t);
    view.hovered = place;
    tip.hidden = !place;
    if (isNew) {
      const name = h('code.token-name', brief(view.group.answers[place.i].tokens[place.t]).slice(0, 60));
      refill(tip, name, tipTable(place, event.target));
      if (isWide() && !view.pinned) tell(place);
    }
    if (place) moveTip(view.parts, event);
  });
  group.addEventListener('mouseleave', () => {
    tip.hidden = true;
    view.hovered = null;
  });
  group.addEventListener('click', (event) => {
    const place = placeOf(event.target);
    if (place) pin(place);
  });
  window.addEventListener('scroll', () => (tip.hidden = true), { passive: true });
}
