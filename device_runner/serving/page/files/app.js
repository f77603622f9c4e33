// The page: connects to the server, asks for the API key, and shows one of two views.
import { Component, Refused, get, html, keep, pause, render, speak, spoken, t, watchers } from "./base.js";
import { Talk } from "./talk.js";
import { Training } from "./training.js";

class App extends Component {
  state = { is_training: location.pathname === "/training" };
  componentDidMount() {
    addEventListener("popstate", () => this.setState({ is_training: location.pathname === "/training" }));
    watchers.add((error) => this.refused(error));
    this.open();
  }
  async open() {
    try {
      const about = await get("/v1/about");
      const models = about.talks ? (await get("/v1/models")).data.map((each) => each.id) : [];
      this.setState({ about, models, needs_key: false, is_wrong: false });
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      if (error.status && error.status !== 401) this.setState({ problem: error.message });
    }
  }
  refused(error) {
    if (error.status === 401) this.setState({ needs_key: true });
    else if (!error.status && !this.state.is_down) this.wait();
  }
  async wait() {
    this.setState({ is_down: true, is_back: false });
    for (let is_up = false; !is_up; ) {
      await pause(1000);
      is_up = (await fetch("/health", { cache: "no-store" }).catch(() => ({}))).ok;
    }
    this.setState({ is_down: false, is_back: true });
    this.open();
  }
  key = (event) => {
    event.preventDefault();
    keep(new FormData(event.target).get("key"));
    this.setState({ is_wrong: false }, async () => {
      await this.open();
      this.setState((state) => ({ is_wrong: state.needs_key }));
    });
  };
  /** Switch to the other view without reloading the page, so that the conversation stays. */
  go = (event, path) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    if (path !== location.pathname) history.pushState({}, "", path);
    this.setState({ is_training: path === "/training" });
  };
  switch_language = () => {
    speak(spoken() === "de" ? "en" : "de");
    this.forceUpdate();
  };
  render(_, { about, models, needs_key, is_wrong, is_down, is_back, is_training, problem }) {
    const trains = is_training || (about && !about.talks);
    document.title = `${t(trains ? "training" : "talk")} – prge`;
    const link = (path, name, is_here) => html`<a href=${path} onClick=${(event) => this.go(event, path)}
      aria-current=${is_here ? "page" : undefined}>${t(name)}</a>`;
    return html`<a class="skip" href="#content">${t("skip")}</a>
      <header class="top"><strong>prge</strong>
        <nav aria-label="prge">${about?.talks && link("/", "talk", !trains)}
          ${link("/training", "training", trains)}</nav>
        <button type="button" class="quiet" lang=${spoken() === "de" ? "en" : "de"}
          onClick=${this.switch_language}>${t("other_language")}</button>
      </header>
      <div role="status" class=${is_down ? "banner bad" : is_back ? "banner" : ""}>
        ${is_down ? t("waiting") : is_back ? t("gone") : ""}</div>
      <main id="content" tabindex="-1">
        ${problem && html`<p class="bad">${problem}</p>`}
        ${needs_key && html`<form class="key" onSubmit=${this.key}><h1>${t("key_title")}</h1>
          <label>${t("key")}<input name="key" type="password" autocomplete="off" required
            aria-describedby="why" aria-invalid=${!!is_wrong} /></label>
          <p id="why" class="muted">${t("key_why")}</p><p role="alert" class="bad">${is_wrong ? t("key_wrong") : ""}</p>
          <button class="first">${t("open")}</button></form>`}
        ${about && html`<div hidden=${needs_key}>
          ${about.talks && html`<div hidden=${trains}>
            <${Talk} about=${about} models=${models} spoken=${spoken()} is_shown=${!trains} /></div>`}
          ${trains && html`<${Training} about=${about} spoken=${spoken()} />`}</div>`}
      </main>`;
  }
}

speak(spoken());
render(html`<${App} />`, document.body);
