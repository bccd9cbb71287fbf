// Keeps the first page's sections and tabs up to date by server-sent events, without moving the focus or closing what is open.
"use strict";

(function () {
  const live = document.getElementById("live");
  const connection = document.getElementById("connection");
  let updated = Date.now();

  function replace(section) {
    const present = document.getElementById(section.id);
    if (!present) {
      live.append(section);
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
    const order = [...template.content.children].map((section) => section.id).filter((id) => id);
    if (order.length === 0) {
      return;
    }
    order.forEach((id) => replace(template.content.getElementById(id)));
    for (const old of [...live.children]) {
      if (!order.includes(old.id)) {
        old.remove();
      }
    }
    // What waits for a person moves up; the tabs are elsewhere.
    order.map((id) => document.getElementById(id)).filter((one) => one.parentNode === live).forEach((one, place) => {
      if (live.children[place] !== one) {
        live.insertBefore(one, live.children[place]);
      }
    });
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
