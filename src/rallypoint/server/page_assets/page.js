"use strict";
// The live page. It gets the model (server/status/model.py) as server-sent events, and draws each part that has
// changed. All text of peers becomes text nodes, never HTML; control characters and marks that reverse the writing
// direction are shown as escapes. Durations (fields that end in _s) go on by themselves between two events.
(() => {
  const CONTROL = /[\ud800-\udbff][\udc00-\udfff]|[\u0000-\u001f\u007f-\u009f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]/g;
  const CLASSES = { running: "calm", starting: "soft", succeeded: "good", done: "good", waiting: "soft", hung: "bad",
    failed: "bad", stopped: "warn", lost: "bad", ended: "soft", stopping: "warn", draining: "warn", gathering: "warn",
    closed: "soft", checking: "warn", unhealthy: "bad" };
  const printable = (value, kept = "") => String(value).replace(CONTROL, (found) =>
    found.length > 1 || kept.includes(found) ? found : "\\u" + found.charCodeAt(0).toString(16).padStart(4, "0"));

  // Building elements: el("p.soft", "text", child, …)
  function el(what, ...inside) {
    const [tag, ...classes] = what.split(".");
    const node = document.createElement(tag);
    if (classes.length) node.className = classes.join(" ");
    for (const one of inside.flat()) {
      if (one instanceof Node) node.append(one);
      else if (one !== null && one !== undefined && one !== "") node.append(printable(one));
    }
    return node;
  }
  const classOf = (state) => Object.hasOwn(CLASSES, state) ? CLASSES[state] : "soft";
  const badge = (state, text) => el("span.badge." + classOf(state), text || state);
  const plural = (count, what) => count + " " + what + (count === 1 ? "" : "s");
  const listed = (names, more) => names.join(", ") + (more ? " and " + more + " more" : "");
  const ofRun = (one) => one.run ? one.name + " of run " + one.run : one.name;

  function duration(s) {
    if (s < 9.95) return s.toFixed(1) + " s";
    const t = Math.round(s);
    if (t < 60) return t + " s";
    if (t < 3600) return Math.floor(t / 60) + " min " + (t % 60) + " s";
    if (t < 86400) return Math.floor(t / 3600) + " h " + Math.floor(t % 3600 / 60) + " min";
    return Math.floor(t / 86400) + " d " + Math.floor(t % 86400 / 3600) + " h";
  }
  function age(s) {  // a duration that goes on
    const node = el("span.age", duration(s));
    node.since = performance.now() / 1000 - s;
    return node;
  }
  function until(s) {  // a time to wait, which passes
    const node = el("span.until", duration(s));
    node.at = performance.now() / 1000 + s;
    return node;
  }
  setInterval(() => {
    if (document.body.classList.contains("stale")) return;
    const now = performance.now() / 1000;
    for (const node of document.querySelectorAll(".age")) node.textContent = duration(now - node.since);
    for (const node of document.querySelectorAll(".until")) node.textContent = duration(Math.max(0, node.at - now));
  }, 1000);
  function size(bytes) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let at = 0;
    while (bytes >= 1024 && at < 4) { bytes /= 1024; at++; }
    return (at ? bytes.toFixed(1) : bytes) + " " + units[at];
  }
  const rows = (items, draw) => el("ul.rows", items.map((one) => el("li", draw(one))));

  function failure(one, title) {
    const head = el("div", el("b", title), " rank ", one.rank, " on ", one.node, " (", one.host, ", pid ", one.pid, "), ",
      age(one.age_s || 0), " ago: ", one.how);
    const text = one.traceback || one.message || "";
    const trace = el("pre");
    trace.append(printable(text, "\n\t"));
    const details = el("details", el("summary", text.trim().split("\n").pop() || "no message"), trace);
    details.dataset.key = "failure " + one.node + " " + one.rank + " " + one.pid;
    details.open = true;
    return el("div.failure", head, details);
  }

  // Runs
  function ranges(numbers) {
    const parts = [];
    for (const n of numbers.sort((a, b) => a - b)) {
      const last = parts[parts.length - 1];
      if (last && n <= last[1] + 1) last[1] = n; else parts.push([n, n]);
    }
    const more = parts.length > 20 ? " and " + (parts.length - 20) + " more ranges" : "";
    return parts.slice(0, 20).map(([a, b]) => a < b ? a + "-" + b : "" + a).join(",") + more;
  }
  function foldedRanks(all) {
    const groups = new Map();
    for (const one of all) {
      const state = one.rank.state || "running";
      const calm = ["calm", "good", "soft"].includes(classOf(state));
      const key = state + "\u0000" + (calm ? "" : one.rank.reason || "");
      if (!groups.has(key)) groups.set(key, { state, calm, reason: calm ? "" : one.rank.reason || "", members: [] });
      groups.get(key).members.push(one);
    }
    return [...groups.values()].sort((a, b) => a.calm - b.calm || a.members.length - b.members.length).slice(0, 20);
  }
  function drawGroup(group) {
    const numbers = group.members.map((one) => one.rank.rank);
    const steps = group.members.map((one) => one.rank.step).filter((step) => Number.isFinite(step));
    const ages = group.members.map((one) => one.rank.progress_age_s + one.age).filter(Number.isFinite);
    const low = Math.min(...steps), high = Math.max(...steps);
    const restarts = Math.max(...group.members.map((one) => one.rank.restarts || 0));
    return [el("b." + classOf(group.state), (numbers.length > 1 ? "ranks " : "rank ") + ranges(numbers)), " ", group.state,
      group.reason ? ": " + group.reason : "", steps.length ? ", step " + (low < high ? low + " to " + high : low) : "",
      ages.length ? [", last progress ", age(Math.max(...ages)), " ago"] : "",
      restarts ? ", restarted " + plural(restarts, "time") : "",
      numbers.length === 1 ? " (" + group.members[0].node + ", pid " + group.members[0].rank.pid + ")" : ""].flat();
  }
  function drawHealth(health) {
    const next = health.next_check_s;
    return [", out for ", age(health.out_s), Number.isFinite(next) ? [", checked again in ", until(next)] : ""].flat();
  }
  function drawNode(node) {
    const where = [node.host, node.address !== node.host ? node.address : ""].filter(Boolean).join(", ");
    return [el("b", node.node), where ? " (" + where + ")" : "", node.rank !== null ? ", rank " + node.rank : "",
      badge(node.state, (node.spare ? "spare, " : "") + node.state), node.since_s !== null ? [" for ", age(node.since_s)] : "",
      node.health ? drawHealth(node.health) : "", node.reason ? ": " + node.reason : "",
      node.silent ? el("b.bad", " silent: no report for ", age(node.report_age_s)) : ""].flat();
  }
  function drawRun(run) {
    const ranks = run.nodes.flatMap((node) =>
      node.ranks.map((rank) => ({ rank, node: node.node, age: node.report_age_s || 0 })))
      .sort((a, b) => a.rank.rank - b.rank.rank);
    const odd = run.nodes.length <= 8 ? run.nodes
      : run.nodes.filter((node) => node.silent || node.spare || !["calm", "good"].includes(classOf(node.state)));
    const shown = odd.slice(0, 40), rest = run.nodes.length - shown.length + run.more_nodes;
    const facts = [run.round ? "round " + run.round : "no round yet", plural(run.nodes.length + run.more_nodes, "node"),
      run.ranks ? plural(run.ranks, "rank") : "",
      run.restarts !== null ? run.restarts + " of " + run.restart_budget + " restarts used" : ""].filter(Boolean);
    const grid = el("div.grid", ranks.slice(0, 4096).map((one) => {
      const state = one.rank.state || "running", cell = el("i." + classOf(state));
      cell.title = printable("rank " + one.rank.rank + ", " + one.node + ", pid " + one.rank.pid + ": " + state +
        (Number.isFinite(one.rank.step) ? ", step " + one.rank.step : ""));
      return cell;
    }));
    return el("section.card", el("h3", "run " + run.run), badge(run.phase, run.result ? run.phase + ": " + run.result : run.phase),
      el("p", run.reason), el("p.soft", facts.join(", "), run.round_s !== null ? [", since ", age(run.round_s)] : ""),
      run.missing.length ? el("p.bad", "lost: " + listed(run.missing.slice(0, 40), Math.max(0, run.missing.length - 40))) : "",
      run.failure ? failure(run.failure, "first failure:") : "",
      ranks.length ? [grid, rows(foldedRanks(ranks), drawGroup)] : "",
      run.more_ranks ? el("p.soft", "and " + run.more_ranks + " more ranks") : "",
      run.nodes.length ? rows(shown, drawNode) : "", rest > 0 ? el("p.soft", "and " + plural(rest, "more node")) : "");
  }

  // The other parts
  function drawMeeting(one) {
    return [el("b", one.kind + " " + ofRun(one)), ": " + one.arrived + " of " + one.size + " for ", age(one.waited_s),
      one.missing.length ? ["; ", el("b.bad", "missing: " + listed(one.missing, one.more_missing))] : "",
      one.withdrawn.length ? " (gave up: " + one.withdrawn.join(", ") + ")" : "", one.reason ? "; " + one.reason : ""].flat();
  }
  function drawLock(one) {
    const queue = one.queue.slice(0, 20).flatMap((next, at) => [at ? ", " : "", next.name + " for ", age(next.waited_s)]);
    return [el("b", "lock " + ofRun(one)), ": held by " + one.holder + " for ", age(one.held_s),
      one.queue.length ? ["; " + (one.queue.length + one.more_queued) + " waiting: ", ...queue] : ""].flat();
  }
  function drawWorkQueue(one) {
    const held = one.held.slice(0, 20).flatMap((item, at) => [at ? ", " : "; held: ", item.item + " by " + item.holder + " for ", age(item.held_s)]);
    return [el("b", "work queue " + ofRun(one)), ": " + one.ready + " ready, " + one.taken + " taken, ",
      one.dead ? el("b.bad", one.dead + " dead") : "0 dead", ", " + one.done + " done, " + one.waiting + " waiting", ...held];
  }
  function waiting(model) {
    const groups = (one) => [el("b", "group " + ofRun(one)), ": " + plural(one.size, "member") + ": " +
      listed(one.members.slice(0, 20), one.size - Math.min(20, one.members.length))];
    const all = [...model.meetings.map(drawMeeting), ...model.locks.map(drawLock), ...model.groups.map(groups),
      ...model.work_queues.map(drawWorkQueue)];
    const more = model.more_meetings + model.more_locks + model.more_groups + model.more_work_queues;
    return all.length ? [el("h2", "Barriers, exchanges, locks, groups, work queues"),
      el("section.card", rows(all, (one) => one), more ? el("p.soft", "and " + more + " more") : "")] : [];
  }
  function stragglers(model) {
    return model.stragglers.length ? [el("h2", "Stragglers"), el("section.card", rows(model.stragglers.slice(0, 20), (one) =>
      [el("b", "member " + one.member), " was last at " + one.kind + " " + ofRun(one) + " in " + one.times_last + " of " +
        plural(one.rounds, "round") + ", " + duration(one.late_s / one.times_last) + " late on average, at worst " +
        duration(one.worst_s)]))] : [];
  }
  function history(model) {
    const past = model.rounds.length ? [el("h2", "Recent rounds"), el("section.card", rows(model.rounds, (one) =>
      [el("b", "run " + one.run + ", round " + one.round), ": " + plural(one.nodes, "node"), ", formed ", age(one.formed_s),
        " ago (" + one.reason + ")", one.lasted_s !== null ? "; lasted " + duration(one.lasted_s) + ": " + one.over : ""]))] : [];
    const failed = model.failures.length ? [el("h2", "Recent failures"), el("section.card",
      model.failures.map((one) => failure(one.failure, "run " + one.run + ":")))] : [];
    for (const part of failed) for (const details of part.querySelectorAll("details")) {
      details.open = false;
      details.dataset.key = "past " + details.dataset.key;
    }
    return [...past, ...failed];
  }
  function server(model) {
    const facts = { connections: model.connections, sessions: model.sessions, memory: size(model.bytes) + " of " +
      size(model.max_bytes), keys: model.keys, "waiting requests": model.waiting, "leased keys": model.leased_keys,
      "rounds with a namespace": model.namespaces, "open pages": model.watchers, "refused connections":
      model.refused_connections, "denied connections": model.denied_connections, ...model.counters, ...model.storage };
    const leases = el("details", el("summary", "leases"), rows(model.leases, (one) => [el("b", one.key), ", of " + one.owner]));
    leases.dataset.key = "leases";
    return [el("h2", "Server"), el("section.card", el("dl", Object.entries(facts).flatMap(([name, fact]) =>
      el("div", el("dt", name.replaceAll("_", " ")), el("dd", fact)))),
      model.servers.length ? el("p", "servers: " + model.servers.join(", ")) : "",
      model.followers.map((one) => el("p", "follower " + one.url + ": " +
        (one.behind ? plural(one.behind, "commit") + " behind" : "up to date"))),
      model.leases.length ? leases : "")];
  }
  function summary(model) {
    const where = model.role === "standby" ? model.leader ? "the leader is at " + model.leader : "no leader: " + model.trouble
      : model.role === "relay" ? "relays " + model.upstream : "";
    return [el("p.soft", model.role + ", version " + model.version + ", pid " + model.pid + ", up ", age(model.uptime_s)),
      where ? el("p", el("b", where)) : "", model.trouble && model.role !== "standby" ? el("p.bad", model.trouble) : "",
      model.storage.disk_full ? el("p.bad", "the disk is full: changes are refused") : ""].filter(Boolean);
  }

  // Drawing: only the parts that changed, durations apart; open and closed details stay as they are.
  const drawn = {};
  function draw(id, facts, nodes) {
    const sign = JSON.stringify(facts, (key, value) => key.endsWith("_s") ? undefined : value);
    if (drawn[id] === sign) return;
    drawn[id] = sign;
    const place = document.getElementById(id), open = {};
    for (const details of place.querySelectorAll("details")) open[details.dataset.key] = details.open;
    const fresh = nodes();
    place.replaceChildren(...fresh);
    for (const details of place.querySelectorAll("details")) {
      if (details.dataset.key in open) details.open = open[details.dataset.key];
    }
  }
  function show(model) {
    document.getElementById("static").hidden = true;
    document.getElementById("live").hidden = false;
    const { runs, meetings, locks, groups, work_queues, rounds, failures } = model;
    draw("summary", [model.role, model.leader, model.upstream, model.trouble, model.pid, model.storage.disk_full], () => summary(model));
    draw("runs", [runs, model.more_runs], () => [...runs.map(drawRun),
      ...(model.more_runs ? [el("p", "and " + model.more_runs + " more runs")] : [])]);
    draw("waiting", [meetings, locks, groups, work_queues], () => waiting(model));
    draw("stragglers", model.stragglers.map((one) => [one, one.late_s]), () => stragglers(model));
    draw("history", [rounds, failures], () => history(model));
    draw("server", [model.connections, model.sessions, model.bytes, model.keys, model.waiting, model.leased_keys,
      model.namespaces, model.watchers, model.counters, model.storage, model.servers, model.followers, model.leases], () => server(model));
  }

  // The connection
  const link = document.getElementById("link");
  let lostAt = null;
  function live() {
    lostAt = null;
    document.body.classList.remove("stale");
    link.className = "live";
    link.textContent = "live";
  }
  function lost(why) {
    lostAt = lostAt || new Date();
    document.body.classList.add("stale");
    link.className = "lost";
    link.textContent = "disconnected since " + lostAt.toLocaleTimeString() + why;
  }
  function connect() {
    const events = new EventSource("/events");
    events.addEventListener("status", (event) => { show(JSON.parse(event.data)); live(); });
    events.onerror = () => {
      const refused = events.readyState === EventSource.CLOSED;
      lost(refused ? "; if the server asks for access again: rallypoint token link" : "");
      if (refused) setTimeout(connect, 2000);
    };
  }
  connect();
})();
