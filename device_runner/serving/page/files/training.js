// Training runs in progress: the server reads the files, draws the charts, and sends updates.
import {
  Button, Component, Facts, Refused, Text, ask, duration, events, get, html, number, pause, spoken, t, told_facts,
} from "./base.js";

const here = () => new URLSearchParams(location.hash.slice(1)).get("run");
const status_of = (run) => t(run.status === "failed" ? "failed_run" : run.status);

export class Training extends Component {
  state = { runs: undefined, chosen: here() };
  componentDidMount() {
    this.turn = () => this.choose(here());
    addEventListener("hashchange", this.turn);
    if (this.props.about.runs) this.list();
  }
  componentWillUnmount() {
    removeEventListener("hashchange", this.turn);
    this.following?.abort();
    this.is_gone = true;
  }
  componentDidUpdate(before) {
    if (before.spoken !== this.props.spoken && this.state.chosen) this.choose(this.state.chosen);
  }
  async list() {
    for (; !this.is_gone; await pause(5000)) {
      try {
        const { data, cut } = await get("/v1/runs");
        this.setState({ runs: data, cut });
        if (!this.following && data.length) this.choose(this.state.chosen ?? data[0].run);
      } catch (error) {
        if (!(error instanceof Refused)) throw error;
      }
    }
  }
  choose(run) {
    if (!run) return;
    this.following?.abort();
    const following = (this.following = new AbortController());
    if (run !== this.state.chosen) this.setState({ told: undefined, note: undefined });
    this.setState({ chosen: run, problem: undefined });
    this.follow(run, following.signal);
  }
  async follow(run, signal) {
    while (!signal.aborted) {
      try {
        const path = `/v1/runs/events?run=${encodeURIComponent(run)}&language=${spoken()}`;
        for await (const told of events(path, undefined, signal)) this.setState({ told, problem: undefined });
      } catch (error) {
        if (error.name === "AbortError") return;
        if (error.status) this.setState({ problem: error.message });
        if (error.status === 404) return;
      }
      await pause(2000);
    }
  }
  stop = async () => {
    try {
      await ask(`/v1/runs/stop?run=${encodeURIComponent(this.state.chosen)}`, {});
      this.setState({ note: t("stopping"), is_refused: false });
    } catch (error) {
      this.setState({ note: error.message, is_refused: true });
    }
  };
  render({ about }, { runs, cut, chosen, told, problem, note, is_refused }) {
    if (!about.runs) return html`<h1>${t("training")}</h1><p>${t("no_folder")}</p>`;
    const run = runs?.find((each) => each.run === chosen);
    const is_here = (each) => (each.run === chosen ? "true" : undefined);
    return html`<div class="training"><nav aria-labelledby="runs"><h1 id="runs">${t("runs")}</h1>
        ${runs?.length === 0 && html`<p>${t("no_runs")}</p>`}
        <ul>${runs?.map((each) => html`<li key=${each.run}>
          <a href=${`#run=${encodeURIComponent(each.run)}`} aria-current=${is_here(each)}>
            ${each.name}<span class="muted">${status_of(each)}</span></a></li>`)}</ul>
        ${cut && html`<p class="muted">${t("too_many")}</p>`}</nav>
      <article aria-labelledby="run">${chosen && html`<h2 id="run">${run?.name ?? chosen}</h2>`}
        ${problem && html`<p class="bad" role="alert">${problem}</p>`}
        ${told && html`<${Run} told=${told} stop=${this.stop} />`}
        <p role="status" class=${is_refused ? "bad" : ""}>${note}</p>
        ${told && html`<${Rest} told=${told} spoken=${spoken()} />`}</article></div>`;
  }
}

function Run({ told, stop }) {
  const { status, score, steps, planned, temperature, can_stop, waits_for } = told;
  const shown = (value, say) => (value === null || value === undefined ? null : say(value));
  const facts = [
    [t("left"), shown(told.left, duration)],
    [t("newest_loss"), shown(told.loss, number)],
    [`${t(score)} ${t("on_development").replace(".", "")}`, shown(told.value, number)],
    [t("forward_passes"), shown(told.forward_passes, number)],
    [t("time"), shown(told.seconds, duration)],
    [t(can_stop ? "memory" : "peak_memory"), shown(told.memory, (bytes) => `${number(Math.round(bytes / 1e6))} MB`)],
    [t("temperature_now"), shown(temperature, (celsius) => `${number(celsius)} °C`)],
  ];
  return html`<div class="bar"><span class=${`mark ${status.replace(" ", "-")}`} role="status">${
        waits_for ? t("paused", waits_for) : status_of(told)}</span>
      ${can_stop && html`<${Button} act=${stop}>${t("stop_run")}<//>`}</div>
    ${planned && html`<label class="progress">${t("step_of", number(steps), number(planned))}
      <progress max=${planned} value=${steps}></progress></label>`}
    <div class="tiles"><${Facts} facts=${facts} /></div>
    ${told.problems.map((each) => html`<p class="bad" key=${each}>${each}</p>`)}`;
}

const Rest = ({ told, spoken }) => html`<div class="figures">
    ${told.pictures.map((each, index) => html`<${Picture} key=${index} ...${each} />`)}</div>
  ${told.evaluations.length > 0 && html`<${Result} told=${told} />`}
  ${told.samples.length > 0 && html`<h3>${t("samples")}</h3>`}
  ${told.samples.map((each, index) => html`<${Sample} key=${index} ...${each} spoken=${spoken} />`)}
  <h3>${t("how")}</h3><${Facts} facts=${told_facts(told.how)} />`;

function Sample({ prompt, right, answers, spoken }) {
  const said = answers.map(({ step, text }) => [step ? t("after_step", number(step)) : t("at_start"), text]);
  if (right) said.push([t("right"), right]);
  return html`<section class="sample"><h4>${t("prompt")}</h4><${Text} text=${prompt} spoken=${spoken} />
    <dl>${said.map(([name, text]) => html`<div key=${name}><dt>${name}</dt>
      <dd><${Text} text=${text} spoken=${spoken} /></dd></div>`)}</dl></section>`;
}

const CALLED = { before: "before", best: "best_of", last: "last" };
function Result({ told: { score, evaluations } }) {
  const names = [t("result"), t("step"), t("loss"), ...(score === "loss" ? [] : [t(score)]), t("in_final")];
  const cells = ({ step, loss, value, final }) => [number(step), number(loss),
    ...(score === "loss" ? [] : [number(value)]), final ? t("yes") : "–"];
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${t("result")}><table>
    <thead><tr>${names.map((name) => html`<th scope="col" key=${name}>${name}</th>`)}</tr></thead>
    <tbody>${evaluations.map((each) => html`<tr key=${each.called}><th scope="row">${t(CALLED[each.called])}</th>
      ${cells(each).map((cell) => html`<td>${cell}</td>`)}</tr>`)}</tbody></table></div>`;
}

/** Show a chart of the server as an image, not as markup of the page. */
class Picture extends Component {
  componentDidMount() {
    this.draw();
  }
  componentDidUpdate(before) {
    if (before.svg !== this.props.svg) this.draw();
  }
  draw() {
    const drawing = new DOMParser().parseFromString(this.props.svg, "image/svg+xml").documentElement;
    drawing.setAttribute("role", "img");
    drawing.setAttribute("aria-label", this.props.caption);
    this.place.replaceChildren(document.importNode(drawing, true));
  }
  render({ caption }) {
    return html`<figure><div ref=${(at) => (this.place = at)}></div><figcaption>${caption}</figcaption></figure>`;
  }
}
