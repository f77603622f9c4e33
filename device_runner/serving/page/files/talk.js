// Chat: turns, each with the answers of one or several models side by side.
import {
  Button, Component, Facts, Refused, Text, ask, events, get, html, keep_talk, kept_talk, number, pause, t, told_facts,
} from "./base.js";

const SETTINGS = [["temperature", 0.1, "1"], ["top_p", 0.05, "1"], ["top_k", 1, "off"], ["min_p", 0.05, "0.1"],
  ["repetition_penalty", 0.05, "1"], ["max_tokens", 1, "256"], ["seed", 1, "random"]];
const THUMB = "M2 7h2.5v7H2zM5.5 14h6a1.6 1.6 0 0 0 1.5-1.2l1.3-4.6A1 1 0 0 0 13.3 7H10V3.5a1.5 1.5 0 0 0-1.5-1.5l-3 5z";
const is_wide = () => matchMedia("(min-width: 64rem)").matches;

export class Talk extends Component {
  constructor(props) {
    super(props);
    const { turns = [], chosen = [], settings = {} } = kept_talk();
    const still = props.models.filter((model) => chosen.includes(model));
    this.state = { turns, chosen: still.length ? still : props.models.slice(0, 1), settings, history: [] };
    this.count = Math.max(0, ...turns.map((turn) => turn.id));
    this.panels = is_wide();
  }
  componentDidMount() {
    this.keys = (event) => event.key === "Escape" && this.stop();
    document.addEventListener("keydown", this.keys);
    addEventListener("beforeunload", this.stop);
    addEventListener("pagehide", this.keep);
    document.addEventListener("visibilitychange", this.keep);
    if (this.props.about.learns) this.look();
  }
  componentWillUnmount() {
    document.removeEventListener("keydown", this.keys);
    removeEventListener("beforeunload", this.stop);
    removeEventListener("pagehide", this.keep);
    document.removeEventListener("visibilitychange", this.keep);
    this.is_gone = true;
    this.stop();
  }
  async look() {
    for (; !this.is_gone; await pause(5000)) await this.read_history();
  }
  read_history = async () => {
    const told = await get("/v1/adapters").catch(() => undefined);
    if (told) this.setState({ history: told.data });
  };
  take_back = async (version) => {
    await ask("/v1/adapters/back", { version }).catch((error) => this.setState({ problem: error.message }));
    await this.read_history();
  };
  getSnapshotBeforeUpdate() {
    return innerHeight + scrollY >= document.documentElement.scrollHeight - 60;
  }
  componentDidUpdate(props, state, was_at_end) {
    const has_grown = was_at_end && this.props.is_shown && state.turns !== this.state.turns;
    if (has_grown) scrollTo(0, document.documentElement.scrollHeight);
  }
  stop = () => this.stopping?.abort();
  keep = () => {
    const { turns, chosen, settings } = this.state;
    // Answers in progress end with the page.
    const ended = (each) => (each.state === "writing" ? { ...each, state: "stopped" } : each);
    keep_talk({ turns: turns.map((turn) => ({ ...turn, answers: turn.answers.map(ended) })), chosen, settings });
  };
  /** Change one answer of a turn, if it still exists. */
  change(id, model, change) {
    this.setState(({ turns }) => ({ turns: turns.map((turn) => turn.id !== id ? turn
      : { ...turn, answers: turn.answers.map((each) => (each.model === model ? { ...each, ...change } : each)) }) }));
  }
  /** Send a message to all selected models; `before` are the previous turns. */
  async ask(text, before) {
    const { chosen, settings } = this.state;
    if (!text.trim() || !chosen.length || this.stopping) return;
    const id = (this.count += 1);
    const answers = chosen.map((model) => ({ model, text: "", state: "writing" }));
    this.stopping = new AbortController();
    this.setState({ turns: [...before, { id, text, answers }], is_asking: true });
    await Promise.all(chosen.map((model) => this.answer(id, model, text, before, settings)));
    this.stopping = undefined;
    this.setState({ is_asking: false });
  }
  async answer(id, model, text, before, settings) {
    const { chats } = this.props.about;
    const body = { model, stream: true, stream_options: { include_usage: true }, max_tokens: 256, ...settings };
    const path = chats ? "/v1/chat/completions" : "/v1/completions";
    if (chats) body.messages = [...spoken_before(before, model), { role: "user", content: text }];
    else body.prompt = text;
    let said = "", began, end = {}, shown;
    const show = () => {
      shown = undefined;
      this.change(id, model, { text: said });
    };
    try {
      for await (const event of events(path, body, this.stopping.signal)) {
        if (event.error) throw new Refused(500, event.error.message);
        const [choice] = event.choices;
        const piece = choice?.delta?.content ?? choice?.text ?? "";
        if (piece) began ??= performance.now();
        said += piece;
        if (choice?.finish_reason) {
          const state = choice.finish_reason === "length" ? "cut" : "done";
          end = { state, answer: event.id, took: (performance.now() - began) / 1000 };
        }
        if (event.usage) end.tokens = event.usage.completion_tokens;
        shown ??= setTimeout(show, 50);
      }
      if (!end.state) throw new Refused(0, t("unreachable"));
    } catch (error) {
      if (error.code === "context_length_exceeded" && chats && before.length) {
        this.change(id, model, { is_short: true });
        return this.answer(id, model, text, before.slice(Math.ceil(before.length / 2)), settings);
      }
      end = error.name === "AbortError" ? { state: "stopped" } : { state: "failed", problem: error.message };
    }
    clearTimeout(shown);
    this.change(id, model, { text: said, ...end });
  }
  judge = async (id, model, answer, judgement) => {
    try {
      await ask("/v1/feedback", { id: answer, ...judgement });
      this.change(id, model, { judged: judgement.rating ?? "corrected", problem: undefined });
    } catch (error) {
      this.change(id, model, { problem: error.message });
    }
  };
  again = (turn, text) => this.ask(text, this.state.turns.slice(0, this.state.turns.indexOf(turn)));
  choose = (model, is_on) => {
    const is_chosen = (each) => (each === model ? is_on : this.state.chosen.includes(each));
    this.setState({ chosen: this.props.models.filter(is_chosen) });
  };
  set = (name, value) => {
    const { [name]: _, ...settings } = this.state.settings;
    if (value !== "" && !isNaN(value)) settings[name] = Number(value);
    this.setState({ settings });
  };
  begin = () => {
    this.stop();
    this.setState({ turns: [] });
  };

  render({ about, models, spoken }, { turns, chosen, settings, is_asking, history, problem }) {
    const { feedback: rates, chats } = about;
    return html`<div class="talk">
      <aside>
        <details open=${this.panels}><summary>${t("settings")}</summary>
          <${Settings} settings=${settings} set=${this.set} /></details>
        <details open=${this.panels}><summary>${t("about")}</summary>
          <${About} about=${about} chosen=${chosen} /></details>
        ${about.learns && html`<details open=${this.panels}><summary>${t("learnt")}</summary>
          <${History} history=${history} take_back=${this.take_back} />
          <p role="alert" class="bad">${problem}</p></details>`}
      </aside>
      <section class="conversation" aria-labelledby="talk-title">
        <div class="bar"><h1 id="talk-title" class="unseen">${t("conversation")}</h1>
          <fieldset class="chips"><legend>${t("who")}</legend>${models.map((model) => html`<label key=${model}>
            <input type="checkbox" checked=${chosen.includes(model)}
              onChange=${(event) => this.choose(model, event.target.checked)} />${model}</label>`)}</fieldset>
          ${turns.length > 0 && html`<${Button} act=${this.begin}>${t("new")}<//>`}</div>
        ${!turns.length && html`<p class="muted">${t("empty")}</p>`}
        ${!chats && html`<p class="muted">${t("no_chat")}</p>`}
        <ol class="turns">${turns.map((turn) => html`<${Turn} key=${turn.id}
          ...${{ turn, rates, spoken, is_asking: !!is_asking, again: this.again, judge: this.judge }} />`)}</ol>
        <div role="status" class="unseen">${is_asking ? t("is_writing") : turns.length ? t("is_done") : ""}</div>
        <${Composer} chats=${chats} is_asking=${is_asking} can=${chosen.length > 0}
          stop=${this.stop} ask=${(text) => this.ask(text, this.state.turns)} />
      </section></div>`;
  }
}

/** Return the previous messages for a model: with its own answers, or another model's where it has none. */
function spoken_before(turns, model) {
  return turns.flatMap(({ text, answers }) => {
    const said = answers.find((each) => each.model === model && each.text) ?? answers.find((each) => each.text);
    return said ? [{ role: "user", content: text }, { role: "assistant", content: said.text }] : [];
  });
}

class Turn extends Component {
  shouldComponentUpdate(props, state) {
    return ["turn", "is_asking", "spoken"].some((name) => props[name] !== this.props[name]) || state !== this.state;
  }
  close = () => this.setState({ is_edited: false }, () => this.button?.focus());
  again = (text) => {
    this.close();
    this.props.again(this.props.turn, text);
  };
  render({ turn, rates, is_asking, spoken, judge }, { is_edited }) {
    const edit = () => this.setState({ is_edited: true });
    return html`<li><div class="asked"><h2 class="unseen">${t("you")}</h2>
      ${is_edited
        ? html`<${Writing} label=${t("edit_message")} text=${turn.text} done=${t("again")} close=${this.close} send=${this.again} />`
        : html`<${Text} text=${turn.text} spoken=${spoken} />
          <button type="button" class="quiet" disabled=${is_asking} onClick=${edit}
            ref=${(at) => (this.button = at)}>${t("edit")}</button>`}</div>
      <div class="answers">${turn.answers.map((each) => html`<${Answer} key=${each.model} answer=${each}
        ...${{ rates, spoken, is_asking }} again=${() => this.again(turn.text)}
        judge=${(judgement) => judge(turn.id, each.model, each.answer, judgement)} />`)}</div></li>`;
  }
}

class Answer extends Component {
  close = () => this.setState({ is_corrected: false });
  correct = (correction) => {
    this.close();
    this.props.judge({ correction });
  };
  rate(rating) {
    return html`<${Button} class="quiet" aria-label=${t(rating)} title=${t(rating)}
      act=${() => this.props.judge({ rating })}><svg class=${rating} viewBox="0 0 16 16" aria-hidden="true">
        <path d=${THUMB} /></svg><//>`;
  }
  notes({ state, tokens, took, is_short }) {
    // For text that arrives at once, the time would measure the network, not the generation.
    const speed = tokens > 1 && took > 0.1 && `${number((tokens - 1) / took)} ${t("speed")}`;
    const end = ["stopped", "cut", "writing"].includes(state) && t(state);
    return [tokens && `${number(tokens)} ${t(tokens === 1 ? "token" : "tokens")}`, speed, end, is_short && t("short")].filter(Boolean).join(" · ");
  }
  render({ answer, rates, spoken, is_asking, again }, { is_corrected }) {
    const { model, state, text, judged, problem } = answer;
    return html`<article class="answer" aria-label=${model} aria-busy=${state === "writing"}><h3>${model}</h3>
      <${Text} text=${text} spoken=${spoken} />
      <footer><span class="muted">${this.notes(answer)}</span>
        ${rates && answer.answer && !judged && !is_corrected && html`<span class="judge">
          ${this.rate("good")}${this.rate("bad")}
          <${Button} class="quiet" act=${() => this.setState({ is_corrected: true })}>${t("correct")}<//></span>`}
        <span role="status">${judged && t("kept")}</span></footer>
      ${problem && html`<p class="bad" role="alert">${state === "failed" && `${t("failed")}: `}${problem}</p>`}
      ${["failed", "stopped"].includes(state) && html`<${Button} disabled=${is_asking} act=${again}>${t("again")}<//>`}
      ${is_corrected && html`<${Writing} label=${t("correction")} text=${text} done=${t("keep")}
        close=${this.close} send=${this.correct} />`}
    </article>`;
  }
}

/** A form to edit a text. */
class Writing extends Component {
  componentDidMount() {
    this.area.focus();
    this.area.form.scrollIntoView({ block: "nearest" });
  }
  submit = (event) => {
    event.preventDefault();
    if (this.area.value.trim()) this.props.send(this.area.value);
  };
  keys = (event) => {
    if (event.key === "Escape") this.props.close();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) this.submit(event);
  };
  render({ label, text, done, close }) {
    return html`<form class="writing" onSubmit=${this.submit}><label>${label}
      <textarea rows="3" dir="auto" defaultValue=${text} onKeyDown=${this.keys}
        ref=${(at) => (this.area = at)}></textarea></label>
      <div class="buttons"><button class="first">${done}</button><${Button} act=${close}>${t("cancel")}<//></div></form>`;
  }
}

class Composer extends Component {
  send = (event) => {
    event.preventDefault();
    if (this.props.is_asking || !this.props.can || !this.area.value.trim()) return;
    this.props.ask(this.area.value);
    this.area.value = "";
  };
  keys = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && this.send(event);
  render({ chats, is_asking, stop, can }) {
    return html`<form class="composer" onSubmit=${this.send}><div class="field">
      <label class="unseen" for="message">${t(chats ? "message" : "text")}</label>
      <textarea id="message" rows="1" dir="auto" aria-describedby="hint" onKeyDown=${this.keys}
        placeholder=${t(chats ? "placeholder" : "placeholder_text")} ref=${(at) => (this.area = at)}></textarea>
      ${is_asking
        ? html`<${Button} act=${stop}>${t("stop")}<//>`
        : html`<button class="first" disabled=${!can}>${t("send")}</button>`}</div>
      <p id="hint" class="muted">${t("hint")}</p></form>`;
  }
}

const Settings = ({ settings, set }) => SETTINGS.map(([name, step, usual]) => html`<label class="setting" key=${name}>${t(name)}
  <input type="number" step=${step} min="0" placeholder=${isNaN(usual) ? t(usual) : usual} value=${settings[name]}
    onInput=${(event) => set(name, event.target.value)} /></label>`);

function About({ about, chosen }) {
  const { bundle = {}, models, context, feedback } = about;
  const facts = [[t("bundle"), bundle.bundle], ...told_facts(bundle), [t("context"), `${number(context)} ${t("tokens")}`]];
  // Facts of the bundle are shown only once.
  const own = (model) => told_facts({ adapter: models && t("none"), ...models?.[model], base_model: "", weights: "" });
  return html`<${Facts} facts=${facts} />
    ${chosen.map((model) => html`<h3 key=${model}>${model}</h3><${Facts} facts=${own(model)} />`)}
    ${!feedback && html`<p class="muted">${t("no_feedback")}</p>`}`;
}

function History({ history, take_back }) {
  const notes = ({ feedback, held_back: held, why }) => [feedback > 0 && t("of_rows", number(feedback)),
    held?.after !== undefined && t("loss_change", `${number(held.before)} → ${number(held.after)}`), why];
  const current = history.find((each) => each.current)?.version;
  return html`<ol class="history">${[...history].reverse().map((each) => html`<li key=${each.version}>
      <strong>${t("adapter_n", each.version)}</strong>: ${t(each.status)}
      ${each.current && html` <span class="mark">${t("current")}</span>`}
      <div class="muted">${notes(each).filter(Boolean).join(" · ")}</div></li>`)}</ol>
    ${current > 0 && html`<${Button} act=${() => take_back(current)}>${t("take_back")}<//>`}`;
}
