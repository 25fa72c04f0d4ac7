// The tokens behind a bar, a cell or a word: a list with links to their groups.

function tokenRow({ place, group, i, t }) {
  const { tokens, correct, entropy, advantage } = group.answers[i];
  const href = `${addressOf(place)}&token=${i + 1}.${t + 1}`;
  const around = (from, to) => visible(tokens.slice(Math.max(0, from), to).join('')).replace(/\s+/g, ' ');
  const [before, after] = [around(t - 6, t).slice(-60), around(t + 1, t + 6).slice(0, 60)];
  return h(
    'tr',
    h('td', h('a', { href }, `step ${whole(group.step)} · group ${group.group}`)),
    h('td', correct ? '✓' : '✗'),
    h('td.context', before, h('mark', brief(tokens[t]).slice(0, 60)), after),
    h('td', number(entropy?.[t])),
    h('td', number(advantage?.[t])),
  );
}

/** Visit every trained token. When the page is due to be painted, `pause` says how far this is; false: stop. */
async function visitTokens(places, visit, pause) {
  let end = performance.now() + SLICE;
  for (const [k, place] of places.entries()) {
    for (const { n } of places.slice(k, k + 8)) groupAt(n); // unpacked while this one is searched
    const group = await groupAt(place.n);
    group.answers.forEach((answer, i) => {
      for (let t = 0; t < answer.tokens.length; t++) if (answer.live[t]) visit(answer, { place, group, i, t });
    });
    if (performance.now() < end) continue;
    if (!(await pause(k + 1))) return false;
    end = performance.now() + SLICE;
  }
  return true;
}

/** Open the list; with `tenth` {d, tops}, of one tenth by increasing entropy. */
async function openTokens(title, r, test, tenth = null) {
  const box = byId('tokens');
  const close = h('button.small.close', { onclick: () => box.close(), 'aria-label': 'Close' }, '✕');
  const count = h('p.quiet', 'Searching …');
  const list = table('token-table', ['group', 'outcome', 'token', 'entropy', 'credit'], []);
  const [body] = list.tBodies;
  body.addEventListener('click', ({ target }) => {
    if (!target.closest('a')) return;
    history.replaceState(null, ''); // the place of the list in the history becomes that of the group
    box.close();
  });
  const scroll = region('div.scroll-x', 'Tokens', list);
  scroll.ariaBusy = 'true';
  box.replaceChildren(close, h('h2', title), count, scroll);
  box.showModal();
  history.pushState({ full: true, dialog: true }, ''); // Back closes it
  // Entropies are rounded here and `tops` are not: look a little beyond the tenth, and cut it out in the end.
  const low = tenth?.d ? tenth.tops[tenth.d - 1] * (1 - 1e-4) : -Infinity;
  const high = tenth ? tenth.tops[tenth.d] * (1 + 1e-4) : Infinity;
  let [found, all, lower] = [[], 0, 0];
  const grow = () => {
    const next = body.rows.length + Math.ceil(window.innerHeight / 24); // more than fit
    body.append(...found.slice(body.rows.length, next).map(tokenRow));
  };
  box.onscroll = () => box.scrollTop + 2 * box.clientHeight > box.scrollHeight && grow();
  const visit = (answer, token) => {
    if (!test(answer, token.t, token.group)) return;
    const H = answer.entropy?.[token.t];
    all += 1;
    if (H < low) lower += 1;
    else if (!(H > high)) found.push({ ...token, H });
  };
  const places = view.all.filter(({ r: run }) => run === r);
  const pause = async (searched) => {
    if (!body.firstChild) grow();
    count.textContent = `Searching … ${searched} of ${plural(places.length, 'group')}`;
    await painted();
    return list.isConnected; // else closed, or another list is open
  };
  if (!(await visitTokens(places, visit, pause))) return;
  if (tenth) {
    const [size, extra] = [Math.floor(all / 10), all % 10]; // as numpy.array_split divides
    const from = tenth.d * size + Math.min(tenth.d, extra) - lower;
    found = found.sort((a, b) => a.H - b.H).slice(from, from + size + (tenth.d < extra ? 1 : 0));
  }
  count.textContent = plural(found.length, 'token');
  body.replaceChildren();
  grow();
  scroll.ariaBusy = null;
}
