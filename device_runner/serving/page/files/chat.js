// Chat: a conversation of turns, each with the answers of one or several models side by side.
import { Component, html } from "./preact.js";
import { ApiError, getJson, request, sleep, streamEvents } from "./api.js";
import { Button, Facts, PlainText, formatFacts } from "./components.js";
import { formatNumber, t } from "./i18n.js";
import { loadChat, storeChat } from "./storage.js";

// Key, step of the input, and placeholder, which is a number or the key of a text.
const SAMPLING_SETTINGS = [["temperature", 0.1, "1"], ["top_p", 0.05, "1"], ["top_k", 1, "off"], ["min_p", 0.05, "0.1"],
  ["repetition_penalty", 0.05, "1"], ["max_tokens", 1, "256"], ["seed", 1, "random"]];
const THUMB_PATH =
  "M2 7h2.5v7H2zM5.5 14h6a1.6 1.6 0 0 0 1.5-1.2l1.3-4.6A1 1 0 0 0 13.3 7H10V3.5a1.5 1.5 0 0 0-1.5-1.5l-3 5z";
const isWideScreen = () => matchMedia("(min-width: 64rem)").matches;
const isSubmitKey = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

/**
 * The chat view. A turn is `{ id, text, answers }` with one answer for each model:
 * `{ model, text, state, completionId, tokens, seconds, feedback, errorMessage, isHistoryTruncated }`,
 * whose state is "generating", "done", "truncated", "stopped" or "failed".
 */
export class Chat extends Component {
  constructor(props) {
    super(props);
    const { turns = [], selectedModels: storedModels = [], settings = {} } = loadChat();
    const availableModels = props.models.filter((model) => storedModels.includes(model));
    const selectedModels = availableModels.length ? availableModels : props.models.slice(0, 1);
    this.state = { turns, selectedModels, settings, adapters: [] };
    this.lastTurnId = Math.max(0, ...turns.map((turn) => turn.id));
    this.arePanelsOpen = isWideScreen();
  }
  componentDidMount() {
    document.addEventListener("keydown", this.onKeyDown);
    addEventListener("beforeunload", this.stop);
    addEventListener("pagehide", this.store);
    document.addEventListener("visibilitychange", this.store);
    if (this.props.about.learns) this.pollAdapters();
  }
  componentWillUnmount() {
    document.removeEventListener("keydown", this.onKeyDown);
    removeEventListener("beforeunload", this.stop);
    removeEventListener("pagehide", this.store);
    document.removeEventListener("visibilitychange", this.store);
    this.isUnmounted = true;
    this.stop();
  }
  async pollAdapters() {
    for (; !this.isUnmounted; await sleep(5000)) await this.loadAdapters();
  }
  loadAdapters = async () => {
    const adapters = await getJson("/v1/adapters").catch(() => undefined);
    if (adapters) this.setState({ adapters: adapters.data });
  };
  revertAdapter = async (version) => {
    await request("/v1/adapters/back", { version }).catch((error) => this.setState({ errorMessage: error.message }));
    await this.loadAdapters();
  };
  /** Return whether the page is scrolled to its end, which componentDidUpdate receives. */
  getSnapshotBeforeUpdate() {
    return innerHeight + scrollY >= document.documentElement.scrollHeight - 60;
  }
  componentDidUpdate(previousProps, previousState, wasScrolledToEnd) {
    const hasChanged = previousState.turns !== this.state.turns;
    if (wasScrolledToEnd && this.props.isVisible && hasChanged) scrollTo(0, document.documentElement.scrollHeight);
  }
  onKeyDown = (event) => event.key === "Escape" && this.stop();
  stop = () => this.abortController?.abort();
  store = () => {
    const { turns, selectedModels, settings } = this.state;
    // Generation ends with the page.
    const stopAnswer = (answer) => (answer.state === "generating" ? { ...answer, state: "stopped" } : answer);
    const stopTurn = (turn) => ({ ...turn, answers: turn.answers.map(stopAnswer) });
    storeChat({ turns: turns.map(stopTurn), selectedModels, settings });
  };
  /** Change fields of a model's answer in a turn, if the turn still exists. */
  updateAnswer(turnId, model, changes) {
    const updateTurn = (turn) => ({
      ...turn, answers: turn.answers.map((answer) => (answer.model === model ? { ...answer, ...changes } : answer)),
    });
    this.setState(({ turns }) => ({ turns: turns.map((turn) => (turn.id === turnId ? updateTurn(turn) : turn)) }));
  }
  /** Send a message to all selected models, as the next turn after the previous ones, and wait for their answers. */
  async send(text, previousTurns) {
    const { selectedModels, settings } = this.state;
    if (!text.trim() || !selectedModels.length || this.abortController) return;
    const id = (this.lastTurnId += 1);
    const answers = selectedModels.map((model) => ({ model, text: "", state: "generating" }));
    this.abortController = new AbortController();
    this.setState({ turns: [...previousTurns, { id, text, answers }], isGenerating: true });
    await Promise.all(selectedModels.map((model) => this.generate(id, model, text, previousTurns, settings)));
    this.abortController = undefined;
    this.setState({ isGenerating: false });
  }
  /** Stream a model's answer into its turn; retries with half of the previous turns if the context is too short. */
  async generate(turnId, model, message, previousTurns, settings) {
    const { chats: hasChatTemplate } = this.props.about;
    const body = { model, stream: true, stream_options: { include_usage: true }, max_tokens: 256, ...settings };
    const path = hasChatTemplate ? "/v1/chat/completions" : "/v1/completions";
    if (hasChatTemplate) body.messages = [...toMessages(previousTurns, model), { role: "user", content: message }];
    else body.prompt = message;
    let text = "", result = {}, firstTokenAt, renderTimer;
    const renderText = () => {
      renderTimer = undefined;
      this.updateAnswer(turnId, model, { text });
    };
    try {
      for await (const event of streamEvents(path, body, this.abortController.signal)) {
        if (event.error) throw new ApiError(500, event.error.message);
        const [choice] = event.choices;
        const delta = choice?.delta?.content ?? choice?.text ?? "";
        if (delta) firstTokenAt ??= performance.now();
        text += delta;
        if (choice?.finish_reason) {
          const state = choice.finish_reason === "length" ? "truncated" : "done";
          result = { state, completionId: event.id, seconds: (performance.now() - firstTokenAt) / 1000 };
        }
        if (event.usage) result.tokens = event.usage.completion_tokens;
        renderTimer ??= setTimeout(renderText, 50);
      }
      if (!result.state) throw new ApiError(0, t("server_unreachable"));
    } catch (error) {
      if (error.code === "context_length_exceeded" && hasChatTemplate && previousTurns.length) {
        this.updateAnswer(turnId, model, { isHistoryTruncated: true });
        const newestTurns = previousTurns.slice(Math.ceil(previousTurns.length / 2));
        return this.generate(turnId, model, message, newestTurns, settings);
      }
      result = error.name === "AbortError" ? { state: "stopped" } : { state: "failed", errorMessage: error.message };
    }
    clearTimeout(renderTimer);
    this.updateAnswer(turnId, model, { text, ...result });
  }
  /** Send a rating or a correction of an answer: `{ rating }` or `{ correction }`. */
  sendFeedback = async (turnId, { model, completionId }, feedback) => {
    try {
      await request("/v1/feedback", { id: completionId, ...feedback });
      this.updateAnswer(turnId, model, { feedback: feedback.rating ?? "corrected", errorMessage: undefined });
    } catch (error) {
      this.updateAnswer(turnId, model, { errorMessage: error.message });
    }
  };
  /** Replace a turn and all later ones by a new turn with this text. */
  resend = (turn, text) => this.send(text, this.state.turns.slice(0, this.state.turns.indexOf(turn)));
  selectModel = (changedModel, isSelected) => {
    const { selectedModels } = this.state;
    const isIncluded = (model) => (model === changedModel ? isSelected : selectedModels.includes(model));
    this.setState({ selectedModels: this.props.models.filter(isIncluded) });
  };
  changeSetting = (name, value) => {
    const { [name]: _, ...settings } = this.state.settings;
    if (value !== "" && !isNaN(value)) settings[name] = Number(value);
    this.setState({ settings });
  };
  startConversation = () => {
    this.stop();
    this.setState({ turns: [] });
  };

  render({ about, models, language }, { turns, selectedModels, settings, isGenerating, adapters, errorMessage }) {
    const { feedback: acceptsFeedback, chats: hasChatTemplate } = about;
    return html`<div class="chat">
      <aside>
        <details open=${this.arePanelsOpen}><summary>${t("sampling")}</summary>
          <${SamplingSettings} settings=${settings} onChange=${this.changeSetting} /></details>
        <details open=${this.arePanelsOpen}><summary>${t("model_details")}</summary>
          <${ModelDetails} about=${about} selectedModels=${selectedModels} /></details>
        ${about.learns && html`<details open=${this.arePanelsOpen}><summary>${t("learned_adapters")}</summary>
          <${AdapterHistory} adapters=${adapters} onRevert=${this.revertAdapter} />
          <p role="alert" class="error">${errorMessage}</p></details>`}
      </aside>
      <section class="conversation" aria-labelledby="talk-title">
        <div class="bar"><h1 id="talk-title" class="visually-hidden">${t("conversation")}</h1>
          <fieldset class="chips"><legend>${t("models")}</legend>${models.map((model) => html`<label key=${model}>
            <input type="checkbox" checked=${selectedModels.includes(model)}
              onChange=${(event) => this.selectModel(model, event.target.checked)} />${model}</label>`)}</fieldset>
          ${turns.length > 0 && html`<${Button} onClick=${this.startConversation}>${t("new_conversation")}<//>`}</div>
        ${!turns.length && html`<p class="muted">${t("empty_conversation")}</p>`}
        ${!hasChatTemplate && html`<p class="muted">${t("no_chat_template")}</p>`}
        <ol class="turns">${turns.map((turn) => html`<${Turn} key=${turn.id} ...${{ turn, acceptsFeedback, language }}
          isGenerating=${!!isGenerating} onResend=${this.resend} onFeedback=${this.sendFeedback} />`)}</ol>
        <div role="status" class="visually-hidden">
          ${isGenerating ? t("answer_generating") : turns.length ? t("answer_complete") : ""}</div>
        <${Composer} ...${{ hasChatTemplate, isGenerating }} canSend=${selectedModels.length > 0}
          onStop=${this.stop} onSend=${(text) => this.send(text, this.state.turns)} />
      </section></div>`;
  }
}

/** Return turns as messages for a model: with its own answers, or another model's where it has none. */
function toMessages(turns, model) {
  return turns.flatMap(({ text, answers }) => {
    const answer = answers.find((own) => own.model === model && own.text) ?? answers.find((other) => other.text);
    return answer ? [{ role: "user", content: text }, { role: "assistant", content: answer.text }] : [];
  });
}

/** The user's message with the models' answers. */
class Turn extends Component {
  shouldComponentUpdate(nextProps, nextState) {
    const hasChanged = (name) => nextProps[name] !== this.props[name];
    return ["turn", "isGenerating", "language"].some(hasChanged) || nextState !== this.state;
  }
  edit = () => this.setState({ isEditing: true });
  closeEditor = () => this.setState({ isEditing: false }, () => this.editButton?.focus());
  resend = (text) => {
    this.closeEditor();
    this.props.onResend(this.props.turn, text);
  };
  render({ turn, acceptsFeedback, isGenerating, language, onFeedback }, { isEditing }) {
    return html`<li><div class="user-message"><h2 class="visually-hidden">${t("you")}</h2>
      ${isEditing
        ? html`<${EditForm} label=${t("edit_message")} text=${turn.text} submitLabel=${t("ask_again")}
            onSubmit=${this.resend} onCancel=${this.closeEditor} />`
        : html`<${PlainText} text=${turn.text} language=${language} />
          <button type="button" class="quiet" disabled=${isGenerating} onClick=${this.edit}
            ref=${(element) => (this.editButton = element)}>${t("edit")}</button>`}</div>
      <div class="answers">${turn.answers.map((answer) => html`<${Answer} key=${answer.model}
        ...${{ answer, acceptsFeedback, isGenerating, language }} onAskAgain=${() => this.resend(turn.text)}
        onFeedback=${(feedback) => onFeedback(turn.id, answer, feedback)} />`)}</div></li>`;
  }
}

/** A model's answer, with buttons to rate and to correct it. */
class Answer extends Component {
  openEditor = () => this.setState({ isCorrecting: true });
  closeEditor = () => this.setState({ isCorrecting: false });
  correct = (correction) => {
    this.closeEditor();
    this.props.onFeedback({ correction });
  };
  renderRatingButton(rating) {
    return html`<${Button} class="quiet" aria-label=${t(rating)} title=${t(rating)}
      onClick=${() => this.props.onFeedback({ rating })}><svg class=${rating} viewBox="0 0 16 16" aria-hidden="true">
        <path d=${THUMB_PATH} /></svg><//>`;
  }
  /** Return number of tokens, speed, and how the answer ended, as one line of text. */
  formatStatus({ state, tokens, seconds, isHistoryTruncated }) {
    // For text that arrives at once, the time would measure the network, not the generation.
    const isSpeedKnown = tokens > 1 && seconds > 0.1;
    return [
      tokens && `${formatNumber(tokens)} ${t(tokens === 1 ? "token" : "tokens")}`,
      isSpeedKnown && `${formatNumber((tokens - 1) / seconds)} ${t("tokens_per_second")}`,
      ["stopped", "truncated", "generating"].includes(state) && t(state),
      isHistoryTruncated && t("history_truncated"),
    ].filter(Boolean).join(" · ");
  }
  render({ answer, acceptsFeedback, language, isGenerating, onAskAgain }, { isCorrecting }) {
    const { model, state, text, completionId, feedback, errorMessage } = answer;
    const canRate = acceptsFeedback && completionId && !feedback && !isCorrecting;
    return html`<article class="answer" aria-label=${model} aria-busy=${state === "generating"}><h3>${model}</h3>
      <${PlainText} text=${text} language=${language} />
      <footer><span class="muted">${this.formatStatus(answer)}</span>
        ${canRate && html`<span class="rating">${this.renderRatingButton("good")}${this.renderRatingButton("bad")}
          <${Button} class="quiet" onClick=${this.openEditor}>${t("correct")}<//></span>`}
        <span role="status">${feedback && t("feedback_saved")}</span></footer>
      ${errorMessage && html`<p class="error" role="alert">
        ${state === "failed" && `${t("no_answer")}: `}${errorMessage}</p>`}
      ${["failed", "stopped"].includes(state) && html`<${Button} disabled=${isGenerating}
        onClick=${onAskAgain}>${t("ask_again")}<//>`}
      ${isCorrecting && html`<${EditForm} label=${t("corrected_answer")} text=${text}
        submitLabel=${t("save_correction")} onSubmit=${this.correct} onCancel=${this.closeEditor} />`}
    </article>`;
  }
}

/** A form to edit a text: Enter submits it, Escape cancels. */
class EditForm extends Component {
  componentDidMount() {
    this.textarea.focus();
    this.textarea.form.scrollIntoView({ block: "nearest" });
  }
  submit = (event) => {
    event.preventDefault();
    if (this.textarea.value.trim()) this.props.onSubmit(this.textarea.value);
  };
  onKeyDown = (event) => {
    if (event.key === "Escape") this.props.onCancel();
    if (isSubmitKey(event)) this.submit(event);
  };
  render({ label, text, submitLabel, onCancel }) {
    return html`<form class="edit-form" onSubmit=${this.submit}><label>${label}
      <textarea rows="3" dir="auto" defaultValue=${text} onKeyDown=${this.onKeyDown}
        ref=${(element) => (this.textarea = element)}></textarea></label>
      <div class="buttons"><button class="primary">${submitLabel}</button>
        <${Button} onClick=${onCancel}>${t("cancel")}<//></div></form>`;
  }
}

/** The form to write the next message. */
class Composer extends Component {
  submit = (event) => {
    event.preventDefault();
    if (this.props.isGenerating || !this.props.canSend || !this.textarea.value.trim()) return;
    this.props.onSend(this.textarea.value);
    this.textarea.value = "";
  };
  onKeyDown = (event) => isSubmitKey(event) && this.submit(event);
  render({ hasChatTemplate, isGenerating, canSend, onStop }) {
    return html`<form class="composer" onSubmit=${this.submit}><div class="field">
      <label class="visually-hidden" for="message">${t(hasChatTemplate ? "message" : "text_to_continue")}</label>
      <textarea id="message" rows="1" dir="auto" aria-describedby="hint" onKeyDown=${this.onKeyDown}
        placeholder=${t(hasChatTemplate ? "message_placeholder" : "text_placeholder")}
        ref=${(element) => (this.textarea = element)}></textarea>
      ${isGenerating
        ? html`<${Button} onClick=${onStop}>${t("stop")}<//>`
        : html`<button class="primary" disabled=${!canSend}>${t("send")}</button>`}</div>
      <p id="hint" class="muted">${t("composer_hint")}</p></form>`;
  }
}

const SamplingSettings = ({ settings, onChange }) => SAMPLING_SETTINGS.map(([name, step, placeholder]) => html`
  <label class="setting" key=${name}>${t(name)}
    <input type="number" step=${step} min="0" placeholder=${isNaN(placeholder) ? t(placeholder) : placeholder}
      value=${settings[name]} onInput=${(event) => onChange(name, event.target.value)} /></label>`);

/** Facts about the bundle, and about the adapter of each selected model. */
function ModelDetails({ about, selectedModels }) {
  const { bundle = {}, models, context, feedback: acceptsFeedback } = about;
  const contextLength = `${formatNumber(context)} ${t("tokens")}`;
  const bundleFacts = [[t("bundle"), bundle.bundle], ...formatFacts(bundle), [t("context"), contextLength]];
  // Empty values hide facts that the bundle already has.
  const adapterFacts = (model) =>
    formatFacts({ adapter: models && t("no_adapter"), ...models?.[model], base_model: "", weights: "" });
  return html`<${Facts} facts=${bundleFacts} />
    ${selectedModels.map((model) => html`<h3 key=${model}>${model}</h3><${Facts} facts=${adapterFacts(model)} />`)}
    ${!acceptsFeedback && html`<p class="muted">${t("no_feedback")}</p>`}`;
}

/** The adapters that were learned while serving, the newest first, with a button that reverts the current one. */
function AdapterHistory({ adapters, onRevert }) {
  const formatDetails = ({ feedback, held_back: heldOutLoss, why }) => [
    feedback > 0 && t("feedback_count", formatNumber(feedback)),
    heldOutLoss?.after !== undefined
      && t("loss_change", `${formatNumber(heldOutLoss.before)} → ${formatNumber(heldOutLoss.after)}`),
    why,
  ].filter(Boolean).join(" · ");
  const currentVersion = adapters.find((adapter) => adapter.current)?.version;
  return html`<ol class="history">${[...adapters].reverse().map((adapter) => html`<li key=${adapter.version}>
      <strong>${t("adapter_version", adapter.version)}</strong>: ${t(adapter.status)}
      ${adapter.current && html` <span class="mark">${t("in_use")}</span>`}
      <div class="muted">${formatDetails(adapter)}</div></li>`)}</ol>
    ${currentVersion > 0 && html`<${Button} onClick=${() => onRevert(currentVersion)}>${t("revert_adapter")}<//>`}`;
}
