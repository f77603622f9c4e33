// Components of both views.
import { Component, html } from "./preact.js";
import { formatDuration, formatNumber, t } from "./i18n.js";

/** A button that does not submit a form. */
export const Button = ({ children, ...props }) => html`<button type="button" ...${props}>${children}</button>`;

const isKnown = ([, value]) => value !== undefined && value !== null && value !== "";
/** A list of names and values, without unknown values. */
export const Facts = ({ facts }) => html`<dl class="facts">
  ${facts.filter(isKnown).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
</dl>`;
const FACT_KEYS = ["base_model", "architecture", "parameters", "weights", "adapter", "rank", "alpha", "estimator",
  "objective", "optimizer", "learning_rate", "train", "training_rows", "steps_taken", "seconds", "best", "hash"];
/** Return the server's facts about a model or a run as translated names and formatted values. */
export const formatFacts = (facts) => FACT_KEYS.map((key) => {
  const value = facts[key];
  if (typeof value !== "number") return [t(key), value];
  return [t(key), key === "seconds" ? formatDuration(value) : formatNumber(value)];
});

const MAX_CHARACTERS = 20000;
/** Text that is shown as it is, never as markup; of a very long text only the beginning, with a button for the rest. */
export class PlainText extends Component {
  shouldComponentUpdate(nextProps, nextState) {
    return nextProps.text !== this.props.text || nextProps.language !== this.props.language
      || nextState.isExpanded !== this.state.isExpanded;
  }
  render({ text }, { isExpanded }) {
    const isTruncated = text.length > MAX_CHARACTERS && !isExpanded;
    const expand = () => this.setState({ isExpanded: true });
    return html`<div class="text" dir="auto">${isTruncated ? text.slice(0, MAX_CHARACTERS) : text}</div>
      ${isTruncated && html`<${Button} onClick=${expand}>${t("show_all", formatNumber(text.length))}<//>`}`;
  }
}
