// The chat of a tab, stored so that a reload of the page restores it.
const CHAT_ITEM = "prge-talk";

/** Store the chat until the tab is closed, unless it is too large. */
export function storeChat(chat) {
  try {
    sessionStorage.setItem(CHAT_ITEM, JSON.stringify(chat));
  } catch {
    sessionStorage.removeItem(CHAT_ITEM);
  }
}
/** Return the stored chat; an empty object if there is none or it is invalid. */
export function loadChat() {
  try {
    return upgradeChat(JSON.parse(sessionStorage.getItem(CHAT_ITEM)));
  } catch {
    return {};
  }
}

/** Return a stored chat with the present names of its fields; earlier pages stored some of them by other names. */
function upgradeChat({ chosen: selectedModels, turns, ...chat }) {
  const upgradeTurn = (turn) => ({ ...turn, answers: turn.answers.map(upgradeAnswer) });
  return { selectedModels, ...chat, turns: turns.map(upgradeTurn) };
}
function upgradeAnswer({ answer: completionId, took: seconds, judged: feedback, problem: errorMessage, ...answer }) {
  const { is_short: isHistoryTruncated, state, ...others } = answer;
  const renamed = { completionId, seconds, feedback, errorMessage, isHistoryTruncated };
  return { ...renamed, state: state === "cut" ? "truncated" : state, ...others };
}
