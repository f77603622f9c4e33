// The page: connects to the server, asks for the API key, and shows one of two views, chat or training.
import { Component, html, render } from "./preact.js";
import { ApiError, errorListeners, getJson, sleep, storeApiKey } from "./api.js";
import { Chat } from "./chat.js";
import { getLanguage, getOtherLanguage, setLanguage, t } from "./i18n.js";
import { Training } from "./training.js";

const TRAINING_PATH = "/training";
const isTrainingPath = () => location.pathname === TRAINING_PATH;

class App extends Component {
  state = { isTraining: isTrainingPath() };
  componentDidMount() {
    addEventListener("popstate", () => this.setState({ isTraining: isTrainingPath() }));
    errorListeners.add((error) => this.onApiError(error));
    this.load();
  }
  /** Load what the server says about itself and its models. */
  async load() {
    try {
      const about = await getJson("/v1/about");
      const models = about.talks ? (await getJson("/v1/models")).data.map((model) => model.id) : [];
      this.setState({ about, models, needsApiKey: false, isApiKeyWrong: false });
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status && error.status !== 401) this.setState({ errorMessage: error.message });
    }
  }
  onApiError(error) {
    if (error.status === 401) this.setState({ needsApiKey: true });
    else if (!error.status && !this.state.isServerDown) this.reconnect();
  }
  async reconnect() {
    this.setState({ isServerDown: true, isServerBack: false });
    for (let isHealthy = false; !isHealthy; ) {
      await sleep(1000);
      isHealthy = (await fetch("/health", { cache: "no-store" }).catch(() => ({}))).ok;
    }
    this.setState({ isServerDown: false, isServerBack: true });
    this.load();
  }
  submitApiKey = (event) => {
    event.preventDefault();
    storeApiKey(new FormData(event.target).get("key"));
    this.setState({ isApiKeyWrong: false }, async () => {
      await this.load();
      this.setState((state) => ({ isApiKeyWrong: state.needsApiKey }));
    });
  };
  /** Switch to the other view without reloading the page, so that the conversation stays. */
  navigate = (event, path) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    if (path !== location.pathname) history.pushState({}, "", path);
    this.setState({ isTraining: path === TRAINING_PATH });
  };
  switchLanguage = () => {
    setLanguage(getOtherLanguage());
    this.forceUpdate();
  };
  render(_, state) {
    const { about, models, errorMessage, needsApiKey, isApiKeyWrong, isServerDown, isServerBack } = state;
    // A server without models has no chat.
    const isTraining = state.isTraining || (about && !about.talks);
    const language = getLanguage();
    document.title = `${t(isTraining ? "training" : "chat")} – prge`;
    const renderLink = (path, name, isCurrent) => html`<a href=${path} onClick=${(event) => this.navigate(event, path)}
      aria-current=${isCurrent ? "page" : undefined}>${name}</a>`;
    return html`<a class="skip" href="#content">${t("skip")}</a>
      <header class="top"><strong>prge</strong>
        <nav aria-label="prge">${about?.talks && renderLink("/", t("chat"), !isTraining)}
          ${renderLink(TRAINING_PATH, t("training"), isTraining)}</nav>
        <button type="button" class="quiet" lang=${getOtherLanguage()}
          onClick=${this.switchLanguage}>${t("other_language")}</button>
      </header>
      <div role="status" class=${isServerDown ? "banner error" : isServerBack ? "banner" : ""}>
        ${isServerDown ? t("server_down") : isServerBack ? t("server_back") : ""}</div>
      <main id="content" tabindex="-1">
        ${errorMessage && html`<p class="error">${errorMessage}</p>`}
        ${needsApiKey && html`<form class="key" onSubmit=${this.submitApiKey}><h1>${t("api_key_title")}</h1>
          <label>${t("api_key")}<input name="key" type="password" autocomplete="off" required
            aria-describedby="why" aria-invalid=${!!isApiKeyWrong} /></label>
          <p id="why" class="muted">${t("api_key_help")}</p>
          <p role="alert" class="error">${isApiKeyWrong ? t("api_key_wrong") : ""}</p>
          <button class="primary">${t("open")}</button></form>`}
        ${about && html`<div hidden=${needsApiKey}>
          ${about.talks && html`<div hidden=${isTraining}>
            <${Chat} about=${about} models=${models} language=${language} isVisible=${!isTraining} /></div>`}
          ${isTraining && html`<${Training} about=${about} language=${language} />`}</div>`}
      </main>`;
  }
}

setLanguage(getLanguage());
render(html`<${App} />`, document.body);
