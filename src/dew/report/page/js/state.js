// What the address remembers: the view, the open group, filters, the pinned token. Defaults are left out.

const view = {
  whole: null, // all that was unpacked
  report: null, // what is shown of it: one task of a study, else everything
  all: [], // every group of the page
  place: null, // the open one: {r, head, n}
  group: null, // and its content
  drawn: '', // the settings that it is drawn with
  scale: null, // the colours of its signal
  column: null, // first position of the column view; else that of the pinned token
  what: null, // settings of the first rule that were changed where rules are compared
  pinned: null, // the token that was clicked, and the last one under the pointer
  hovered: null,
  hits: null, // groups that the search found
  parts: {},
};

const DEFAULTS = {
  mode: 'text', // or columns, methods, same
  signal: '', // what colours the tokens; empty: relative, or entropy where credit is uniform
  only: 'all', // which answers, in which order
  sort: 'given',
  more: '', // yes: further controls are unfolded
  with: 'all', // which groups, of which run, in which order
  in: '',
  by: '',
  q: '',
  steps: '', // yes: the arithmetic of the token is unfolded
  token: '', // answer.position of the pinned token
  task: '', // of a study; empty: the first
  as: '', // values, differences; empty: differences in a study
  chart: '', // the metric to scroll to
  smooth: '0.3',
  seeds: '', // each, mean; empty: mean if an arm has several runs
  hide: '', // runs that are hidden in the curves
  shown: '', // the run of the credit view
  find: '', // the query of the list of tokens
  rule: '', // the two rules that are compared
  than: '',
};
const state = { ...DEFAULTS };
let viewName = 'overview';

const groupPlace = ({ r, head }) => `step=${head.step}&group=${head.group}${manyRuns() ? `&run=${r + 1}` : ''}`;
const addressOf = (place) => `#${groupPlace(place)}`;

function fullAddress() {
  const open = viewName === 'groups' && view.group;
  const rest = Object.keys(DEFAULTS)
    .filter((name) => state[name] !== DEFAULTS[name])
    .map((name) => `&${name}=${encodeURIComponent(state[name])}`);
  return `#${open ? groupPlace(view.place) : viewName}${rest.join('')}`;
}

/** Keep the address in step with the page. */
function remember() {
  const address = fullAddress();
  if (!history.state?.full || address !== location.hash)
    history.replaceState({ ...history.state, full: true }, '', address);
}

/** Set entries of the state and remember them. */
function set(changes) {
  Object.assign(state, changes);
  remember();
}

/** For a control: set one entry of the state to what it gives, then draw again. */
const setting = (name, redraw) => (value) => {
  set({ [name]: value });
  redraw();
};

/** Attributes of a <details> whose state the address remembers. */
const remembered = (name) => ({
  open: state[name] === 'yes',
  ontoggle: ({ target }) => set({ [name]: target.open ? 'yes' : '' }),
});

/** The group that an address names; where the page lacks that step, one of the nearest step. */
function findAddress(wish) {
  if (!wish.has('step')) return null;
  const run = view.all.filter((g) => g.r === Number(wish.get('run') || 1) - 1);
  const away = (g) => Math.abs(g.head.step - Number(wish.get('step')));
  const least = Math.min(...run.map(away));
  const near = run.filter((g) => away(g) === least);
  return near.find((g) => g.head.group === Number(wish.get('group') || 0)) || near[0] || null;
}

/** Read the address into the state; a link changes only what it names, a remembered address everything. */
function readAddress() {
  const wish = new URLSearchParams(location.hash.replace(/^#/, ''));
  if (history.state?.full) Object.assign(state, DEFAULTS);
  else Object.assign(state, { token: '', chart: '', find: '' });
  for (const name of Object.keys(DEFAULTS)) if (wish.has(name)) state[name] = wish.get(name);
  return [Object.keys(VIEWS).find((name) => wish.has(name)), findAddress(wish)];
}
