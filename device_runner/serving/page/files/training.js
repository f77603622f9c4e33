// Training runs: the server reads their files, draws the charts, and sends a snapshot whenever something changes.
import { Component, html } from "./preact.js";
import { ApiError, getJson, request, sleep, streamEvents } from "./api.js";
import { Button, Facts, PlainText, formatFacts } from "./components.js";
import { formatDuration, formatNumber, getLanguage, t } from "./i18n.js";

/** Return the run that the URL selects, which is a path below the server's folder. */
const runOfUrl = () => new URLSearchParams(location.hash.slice(1)).get("run");

/** The training view: a list of runs, and the selected run. */
export class Training extends Component {
  state = { runs: undefined, selectedRun: runOfUrl() };
  componentDidMount() {
    addEventListener("hashchange", this.onHashChange);
    if (this.props.about.runs) this.pollRuns();
  }
  componentWillUnmount() {
    removeEventListener("hashchange", this.onHashChange);
    this.abortController?.abort();
    this.isUnmounted = true;
  }
  componentDidUpdate(previousProps) {
    // The server translates the charts.
    if (previousProps.language !== this.props.language) this.selectRun(this.state.selectedRun);
  }
  onHashChange = () => this.selectRun(runOfUrl());
  async pollRuns() {
    for (; !this.isUnmounted; await sleep(5000)) {
      try {
        const { data: runs, cut: isListTruncated } = await getJson("/v1/runs");
        this.setState({ runs, isListTruncated });
        if (!this.abortController && runs.length) this.selectRun(this.state.selectedRun ?? runs[0].run);
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
      }
    }
  }
  selectRun(run) {
    if (!run) return;
    this.abortController?.abort();
    const abortController = (this.abortController = new AbortController());
    if (run !== this.state.selectedRun) this.setState({ snapshot: undefined, stopMessage: undefined });
    this.setState({ selectedRun: run, errorMessage: undefined });
    this.streamSnapshots(run, abortController.signal);
  }
  async streamSnapshots(run, signal) {
    while (!signal.aborted) {
      try {
        const path = `/v1/runs/events?run=${encodeURIComponent(run)}&language=${getLanguage()}`;
        for await (const snapshot of streamEvents(path, undefined, signal)) {
          this.setState({ snapshot, errorMessage: undefined });
        }
      } catch (error) {
        if (error.name === "AbortError") return;
        if (error.status) this.setState({ errorMessage: error.message });
        if (error.status === 404) return;
      }
      await sleep(2000);
    }
  }
  stopRun = async () => {
    try {
      await request(`/v1/runs/stop?run=${encodeURIComponent(this.state.selectedRun)}`, {});
      this.setState({ stopMessage: t("run_stops"), hasStopFailed: false });
    } catch (error) {
      this.setState({ stopMessage: error.message, hasStopFailed: true });
    }
  };
  render({ about, language }, state) {
    const { runs, isListTruncated, selectedRun, snapshot, errorMessage, stopMessage, hasStopFailed } = state;
    if (!about.runs) return html`<h1>${t("training")}</h1><p>${t("no_runs_folder")}</p>`;
    const runName = runs?.find(({ run }) => run === selectedRun)?.name ?? selectedRun;
    return html`<div class="training"><nav aria-labelledby="runs"><h1 id="runs">${t("training_runs")}</h1>
        ${runs?.length === 0 && html`<p>${t("no_runs")}</p>`}
        <ul>${runs?.map(({ run, name, status }) => html`<li key=${run}>
          <a href=${`#run=${encodeURIComponent(run)}`} aria-current=${run === selectedRun ? "true" : undefined}>
            ${name}<span class="muted">${t(status)}</span></a></li>`)}</ul>
        ${isListTruncated && html`<p class="muted">${t("more_runs")}</p>`}</nav>
      <article aria-labelledby="run">${selectedRun && html`<h2 id="run">${runName}</h2>`}
        ${errorMessage && html`<p class="error" role="alert">${errorMessage}</p>`}
        ${snapshot && html`<${RunProgress} snapshot=${snapshot} onStop=${this.stopRun} />`}
        <p role="status" class=${hasStopFailed ? "error" : ""}>${stopMessage}</p>
        ${snapshot && html`<${RunResults} snapshot=${snapshot} language=${language} />`}</article></div>`;
  }
}

/** A run's status, progress and newest values. */
function RunProgress({ snapshot, onStop }) {
  const { status, score, steps, planned: plannedSteps, can_stop: canStop, waits_for: pauseReason } = snapshot;
  const formatValue = (value, format) => (value === null || value === undefined ? null : format(value));
  const formatMegabytes = (bytes) => `${formatNumber(Math.round(bytes / 1e6))} MB`;
  const formatCelsius = (celsius) => `${formatNumber(celsius)} °C`;
  const facts = [
    [t("time_left"), formatValue(snapshot.left, formatDuration)],
    // The loss of a run that learns from a reward is the negative reward.
    score === "reward" || typeof snapshot.reward === "number"
      ? [t("last_training_reward"), formatValue(snapshot.reward, formatNumber)]
      : [t("last_training_loss"), formatValue(snapshot.loss, formatNumber)],
    [`${t(score)} ${t("on_development_rows").replace(".", "")}`, formatValue(snapshot.value, formatNumber)],
    [t("forward_passes"), formatValue(snapshot.forward_passes, formatNumber)],
    [t("time"), formatValue(snapshot.seconds, formatDuration)],
    [t(canStop ? "memory" : "peak_memory"), formatValue(snapshot.memory, formatMegabytes)],
    [t("device_temperature"), formatValue(snapshot.temperature, formatCelsius)],
  ];
  return html`<div class="bar"><span class=${`mark ${status.replace(" ", "-")}`} role="status">${
        pauseReason ? t("paused", pauseReason) : t(status)}</span>
      ${canStop && html`<${Button} onClick=${onStop}>${t("stop_run")}<//>`}</div>
    ${plannedSteps && html`<label class="progress">${t("step_of", formatNumber(steps), formatNumber(plannedSteps))}
      <progress max=${plannedSteps} value=${steps}></progress></label>`}
    <div class="tiles"><${Facts} facts=${facts} /></div>
    ${snapshot.problems.map((problem) => html`<p class="error" key=${problem}>${problem}</p>`)}`;
}

/** A run's charts, evaluations, samples and settings. */
const RunResults = ({ snapshot: { pictures: charts, evaluations, samples, score, how: settings }, language }) => html`
  <div class="figures">${charts.map((chart, index) => html`<${Chart} key=${index} ...${chart} />`)}</div>
  ${evaluations.length > 0 && html`<${EvaluationTable} evaluations=${evaluations} score=${score} />`}
  ${samples.length > 0 && html`<h3>${t("samples")}</h3>`}
  ${samples.map((sample, index) => html`<${Sample} key=${index} ...${sample} language=${language} />`)}
  <h3>${t("training_settings")}</h3><${Facts} facts=${formatFacts(settings)} />`;

/** A prompt with completions before and during training, and the reference if there is one. */
function Sample({ prompt, right: reference, answers: completions, language }) {
  const entries = completions.map(({ step, text }) =>
    [step ? t("after_step", formatNumber(step)) : t("before_training"), text]);
  if (reference) entries.push([t("reference"), reference]);
  return html`<section class="sample"><h4>${t("prompt")}</h4><${PlainText} text=${prompt} language=${language} />
    <dl>${entries.map(([name, text]) => html`<div key=${name}><dt>${name}</dt>
      <dd><${PlainText} text=${text} language=${language} /></dd></div>`)}</dl></section>`;
}

/** The evaluations before training, at the best step and at the last one. */
function EvaluationTable({ evaluations, score }) {
  const lossCells = (cell) => (score === "reward" ? [] : [cell]);
  const scoreCells = (cell) => (score === "loss" ? [] : [cell]);
  const header =
    [t("evaluations"), t("step"), ...lossCells(t("loss")), ...scoreCells(t(score)), t("saved_in_final")];
  const cellsOf = ({ step, loss, value, final: isFinal }) =>
    [formatNumber(step), ...lossCells(formatNumber(loss)), ...scoreCells(formatNumber(value)), isFinal ? t("yes") : "–"];
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${t("evaluations")}><table>
    <thead><tr>${header.map((name) => html`<th scope="col" key=${name}>${name}</th>`)}</tr></thead>
    <tbody>${evaluations.map(({ called: name, ...evaluation }) => html`<tr key=${name}>
      <th scope="row">${t(`evaluation_${name}`)}</th>
      ${cellsOf(evaluation).map((cell) => html`<td>${cell}</td>`)}</tr>`)}</tbody></table></div>`;
}

/** A chart that the server has drawn, inserted as an image with a label rather than as markup of the page. */
class Chart extends Component {
  componentDidMount() {
    this.insertSvg();
  }
  componentDidUpdate(previousProps) {
    if (previousProps.svg !== this.props.svg) this.insertSvg();
  }
  insertSvg() {
    const svg = new DOMParser().parseFromString(this.props.svg, "image/svg+xml").documentElement;
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", this.props.caption);
    this.container.replaceChildren(document.importNode(svg, true));
  }
  render({ caption }) {
    return html`<figure><div ref=${(element) => (this.container = element)}></div>
      <figcaption>${caption}</figcaption></figure>`;
  }
}
