// Keeps the first page's sections up to date by server-sent events, without moving the focus or closing what is open.
"use strict";

(function () {
  const live = document.getElementById("live");
  const connection = document.getElementById("connection");
  let updated = Date.now();

  // Behind the section before it, so that the order stays when some come back, as after an outage of the database.
  function replace(section, before) {
    const present = document.getElementById(section.id);
    if (!present) {
      const previous = before && document.getElementById(before);
      live.insertBefore(section, previous ? previous.nextSibling : live.firstChild);
      return;
    }
    // What is open stays open.
    for (const details of present.querySelectorAll("details[open][id]")) {
      const same = section.querySelector("#" + details.id);
      if (same) {
        same.open = true;
      }
    }
    if (present.outerHTML === section.outerHTML || present.contains(document.activeElement)) {
      return;
    }
    present.replaceWith(section);
  }

  function show(event) {
    const template = document.createElement("template");
    template.innerHTML = event.data;
    const sections = [...template.content.children].filter((section) => section.id);
    if (sections.length === 0) {
      return;
    }
    const order = sections.map((section) => section.id);
    sections.forEach((section, number) => replace(section, order[number - 1]));
    for (const old of [...live.children]) {
      if (!sections.some((section) => section.id === old.id)) {
        old.remove();
      }
    }
    updated = Date.now();
    tell();
  }

  function tell() {
    const seconds = Math.round((Date.now() - updated) / 1000);
    const text = seconds < 10 ? "" : "Not updated for " + seconds + " seconds: the worker does not answer.";
    if (connection.textContent !== text) {
      connection.textContent = text;
    }
  }

  function connect() {
    const events = new EventSource("/live");
    events.addEventListener("sections", show);
    events.onerror = function () {
      // The browser reconnects by itself, unless it was refused.
      if (events.readyState === EventSource.CLOSED) {
        setTimeout(connect, 5000);
      }
    };
  }

  connect();
  setInterval(tell, 1000);
})();
