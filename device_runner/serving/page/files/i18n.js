// Texts in the user's language, and formats of numbers and durations.
const LANGUAGE_ITEM = "prge-language";
const texts = await (await fetch("/page/texts.json")).json();
const storedLanguage = localStorage.getItem(LANGUAGE_ITEM);
let language = Object.hasOwn(texts, storedLanguage) ? storedLanguage : /^de\b/i.test(navigator.language) ? "de" : "en";

/** Return the language of the page, "en" or "de". */
export const getLanguage = () => language;
/** Return the language that the page can switch to. */
export const getOtherLanguage = () => (language === "de" ? "en" : "de");
/** Switch the page to a language, which this browser remembers; components must be rendered again. */
export function setLanguage(newLanguage) {
  language = newLanguage;
  localStorage.setItem(LANGUAGE_ITEM, language);
  document.documentElement.lang = language;
}

/** Return the text of a key of texts.json, with each `{}` replaced by the next value; an unknown key is returned. */
export function t(key, ...values) {
  const template = Object.hasOwn(texts[language], key) ? texts[language][key] : String(key);
  return values.reduce((text, value) => text.replace("{}", () => value), template);
}

/** Format a number as prge does: four significant digits, thousands separated by a narrow space. */
export function formatNumber(value) {
  if (typeof value !== "number" || !isFinite(value)) return String(value ?? "–");
  if (Math.abs(value) >= 1e15) return value.toExponential(3);
  const isRounded = Number.isInteger(value) || Math.abs(value) >= 1000;
  if (isRounded) return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, "\u202f");
  return String(Number(value.toPrecision(4)));
}
/** Format seconds as seconds, minutes or hours. */
export function formatDuration(seconds) {
  if (typeof seconds !== "number") return "–";
  const total = Math.round(seconds), minutes = Math.floor(total / 60);
  if (total < 60) return `${total} s`;
  if (minutes < 60) return `${minutes} min ${total % 60} s`;
  return `${formatNumber(Math.floor(minutes / 60))} h ${minutes % 60} min`;
}
