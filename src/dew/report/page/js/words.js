// Text as it is: what has no shape of its own, or would reorder its neighbours, is shown by name.

const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

const named = (character) => `⟨U+${character.charCodeAt(0).toString(16).toUpperCase().padStart(4, '0')}⟩`;
const visible = (text) => text.replace(UNSEEN, named);

/** A token on one line: line breaks and tabs as signs. */
const brief = (text) => visible(text).replace(/\n/g, '⏎').replace(/\t/g, '⇥').replace(/ /g, '·') || '∅';

/** A token in running text: a line break shows its sign and still breaks the line. */
const running = (text) => visible(text).replace(/\n/g, '⏎\n');
