// The page: asks the daemon's API every few seconds and shows what it says. It changes nothing there.

import { draw } from "./chart.js";
import { column, element, figure, fill, meter } from "./table.js";
import { ago, bytes, clock, count, percent, rate, short, span, sum } from "./words.js";

const EVERY_MS = 2000, SLOWLY = 5;  // what costs the daemon a count is asked every fifth time
const HOUR_S = 3600, RECENT_S = 60;
const KEPT = 2000;  // samples
const TIERS = ["host", "nvme", "redis", "object"];

const told = {};  // the last answers, by name
let samples = [];
let now = 0;  // the daemon's clock at the last answer
let round = 0;
let paused = false;
let lostSince = null;

const at = (id) => document.getElementById(id);
const kind = (tier) => (TIERS.includes(tier) ? tier : "other");

// asking

async function ask(name, query = "") {
  const answer = await fetch(`api/${name}${query}`, { headers: { Accept: "application/json" } });
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error ?? `${answer.status}`);
  now = said.time;
  told[name] = said[name];
}

async function look() {
  const slow = round % SLOWLY === 0;
  const wanted = [ask("stats"), ask("events", "?count=200")];
  if (slow) wanted.push(...["namespaces", "tenants", "agents", "curve"].map((name) => ask(name)), ask("prefixes", "?count=16"));
  if (round === 0) wanted.push(ask("info"), ask("history"));
  await Promise.all(wanted);
  if (round === 0) samples = told.history;
  samples.push(sample(told.stats, now));
  samples = samples.filter((each) => each.time > now - HOUR_S).slice(-KEPT);
  round += 1;
}

function sample(stats, time) {
  const counters = stats.counters ?? {};
  return {
    time,
    asked_tokens: counters.asked_tokens ?? 0,
    stored_bytes: counters.stored_bytes ?? 0,
    hit_tokens: counters.hit_tokens ?? {},
    loaded_bytes: counters.loaded_bytes ?? {},
  };
}

async function turn() {
  if (!paused && !document.hidden) {
    try {
      await look();
      lostSince = null;
      show();
      say("live", `live, ${clock(now)}`);
    } catch (error) {
      lostSince ??= Date.now() / 1000;
      round = 0;  // it may be another daemon that answers next
      say("lost", `no answer since ${clock(lostSince)}: ${error.message}`);
    }
  }
  setTimeout(turn, EVERY_MS);
}

function say(state, words) {
  at("state").dataset.state = state;
  document.body.dataset.state = state;
  if (at("state").textContent !== words) at("state").textContent = words;
}

// showing

function show() {
  const { stats } = told;
  const counters = stats.counters ?? {};
  const models = [...new Set(told.namespaces.map((each) => each.model).filter(Boolean))];
  const whose = told.info.tenant === null ? "" : `tenant ${told.info.tenant}`;
  at("who").textContent = [whose, models.slice(0, 3).join(", "), `up ${span(now - told.info.since)}`,
    `version ${told.info.version}`].filter(Boolean).join(" · ");
  const out = Object.entries(stats.bypass ?? {}).filter(([, on]) => on).map(([path]) => path);
  at("bypass").hidden = !out.length;
  at("bypass").textContent = `Bypassed: ${out.join(" and ")}. An operator has taken the cache out of this path; kvcache bypass off puts it back.`;
  const recent = since(RECENT_S);
  glance(counters, recent);
  tiers(stats, counters, recent);
  overTime();
  whatMore();
  misses(counters);
  prefixes();
  owners();
  namespaces();
  events();
}

// What was counted in the last so many seconds, and over how many.
function since(seconds) {
  const last = samples[samples.length - 1];
  const first = samples.find((each) => each.time >= last.time - seconds) ?? last;
  return { first, last, seconds: Math.max(last.time - first.time, 1e-9), one: first === last };
}

function grown(recent, name, label) {
  const value = (each) => (label === undefined ? each[name] : each[name][label] ?? 0);
  return recent.one ? 0 : Math.max(0, value(recent.last) - value(recent.first));
}

function glance(counters, recent) {
  const asked = counters.asked_tokens ?? 0, hits = sum(counters.hit_tokens);
  const lately = grown(recent, "asked_tokens");
  const found = Object.keys(recent.last.hit_tokens).reduce((total, tier) => total + grown(recent, "hit_tokens", tier), 0);
  const loaded = Object.keys(recent.last.loaded_bytes).reduce((total, tier) => total + grown(recent, "loaded_bytes", tier), 0);
  at("figures").replaceChildren(
    figure("Hit rate", percent(hits, asked) || "none asked", lately ? `${percent(found, lately)} in the last minute` : "nothing in the last minute", "hit_rate", asked ? hits / asked : ""),
    figure("Tokens found", short(hits), `of ${short(asked)} asked for`, "hit_tokens", hits),
    figure("Requests", short(counters.requests ?? 0), counters.misses ? `${short(sum(counters.misses))} missed a part` : "none missed a part", "requests", counters.requests ?? 0),
    figure("Loads", `${rate(loaded / recent.seconds)} GB/s`, `${bytes(sum(counters.loaded_bytes))} in all`, "loaded_bytes", sum(counters.loaded_bytes)),
    figure("Stores", `${rate(grown(recent, "stored_bytes") / recent.seconds)} GB/s`, `${bytes(counters.stored_bytes ?? 0)} in all`, "stored_bytes", counters.stored_bytes ?? 0),
  );
}

function tiers(stats, counters, recent) {
  const asked = counters.asked_tokens ?? 0;
  const rows = Object.entries(stats.tiers).map(([name, tier]) => ({ name, ...tier }));
  fill(at("tiers"), [
    column("tier", (t) => element("span", { class: "whole" }, element("i", { class: kind(t.name), "aria-hidden": "true" }), t.name)),
    column("used", (t) => [bytes(t.used_bytes), `tiers.${t.name}.used_bytes`, t.used_bytes], { number: true }),
    column("of", (t) => (t.capacity_bytes ? [bytes(t.capacity_bytes), `tiers.${t.name}.capacity_bytes`, t.capacity_bytes] : "others share it"), { number: true, rank: 2 }),
    column("full", (t) => (t.capacity_bytes ? element("span", { class: "full" }, meter(t.used_bytes, t.capacity_bytes, kind(t.name)), percent(t.used_bytes, t.capacity_bytes)) : "")),
    column("hit rate", (t) => [percent(counters.hit_tokens?.[t.name] ?? 0, asked), `hit_rate.${t.name}`, asked ? (counters.hit_tokens?.[t.name] ?? 0) / asked : ""], { number: true, hint: "tokens found here, of all that were asked for" }),
    column("GB/s", (t) => [rate(grown(recent, "loaded_bytes", t.name) / recent.seconds)], { number: true, rank: 2, hint: "loaded from here in the last minute" }),
    column("records", (t) => [count(t.records), `tiers.${t.name}.records`, t.records], { number: true, rank: 2 }),
    column("held", (t) => (t.held_bytes === undefined ? "" : bytes(t.held_bytes)), { number: true, rank: 3, hint: "what requests keep from leaving" }),
    column("pinned", (t) => (t.pinned_bytes === undefined ? "" : bytes(t.pinned_bytes)), { number: true, rank: 3, hint: "what an operator keeps from leaving" }),
    column("state", (t) => (t.troubles?.length ? element("span", { class: "bad" }, t.troubles.join("; ")) : "well"), { rank: 2, name: true }),
  ], rows, "No tier tells of anything yet.");
}

function overTime() {
  const names = [...new Set(samples.flatMap((each) => Object.keys(each.hit_tokens)))].sort((a, b) => TIERS.indexOf(a) - TIERS.indexOf(b));
  const length = samples[samples.length - 1].time - samples[0].time > HOUR_S / 6 ? 60 : 10;
  const xs = [], asked = [], found = names.map(() => []);
  for (let i = 1; i < samples.length; i += 1) {
    const [before, after] = [samples[i - 1], samples[i]];
    const slot = Math.floor(after.time / length) * length;
    if (slot !== xs[xs.length - 1]) {
      xs.push(slot);
      asked.push(0);
      found.forEach((each) => each.push(0));
    }
    const grew = (read) => Math.max(0, read(after) - read(before));
    asked[asked.length - 1] += grew((each) => each.asked_tokens);
    names.forEach((name, n) => { found[n][xs.length - 1] += grew((each) => each.hit_tokens[name] ?? 0); });
  }
  const any = asked.some((each) => each > 0);
  draw(at("rate"), {
    xs: any ? xs : [],
    stacked: true,
    yMax: 1,
    yLabel: (value) => `${100 * value} %`,
    xLabel: clock,
    xTicks: xs.length > 1 ? [xs[0], (xs[0] + xs[xs.length - 1]) / 2, xs[xs.length - 1]] : xs,
    label: "Hit rate over time, stacked by tier; arrow keys move the cursor",
    series: names.map((name, n) => ({ name, kind: kind(name), values: found[n].map((hit, i) => (asked[i] ? hit / asked[i] : null)) })),
    said: (i) => `${clock(xs[i])}: ${asked[i] ? `${count(asked[i])} tokens asked for; ${names.map((name, n) => `${percent(found[n][i], asked[i])} in ${name}`).join(", ")}` : "nothing was asked for"}`,
    none: "Nothing was asked for in the last hour.",
  });
}

function whatMore() {
  const curves = Object.entries(told.curve.tiers).map(([name, tier]) => [name, tier.points]).filter(([, points]) => points.length);
  const xs = curves.length ? curves[0][1].map((point) => Math.log2(point.times)) : [];
  const times = (x) => `${Number((2 ** x).toPrecision(3))}x`;
  draw(at("curve"), {
    xs,
    yMax: 1,
    yLabel: (value) => `${100 * value} %`,
    xLabel: times,
    xTicks: xs,
    label: "Hit rate by size of each tier; arrow keys move the cursor",
    series: curves.map(([name, points]) => ({ name, kind: kind(name), values: points.map((point) => point.hit_rate) })),
    said: (i) => `${times(xs[i])}: ${curves.map(([name, points]) => `${percent(points[i].hit_rate, 1)} with ${points[i].capacity_bytes ? `${bytes(points[i].capacity_bytes)} of ` : ""}${name}`).join(", ")}`,
    start: xs.indexOf(0),
    none: "No request has ended yet, or none is sampled (evict.mrc_samples).",
  });
}

function misses(counters) {
  const rows = Object.entries(counters.misses ?? {}).sort((a, b) => b[1] - a[1]);
  const all = sum(counters.misses);
  fill(at("misses"), [
    column("reason", ([reason]) => reason.replaceAll("_", " ")),
    column("requests", ([reason, times]) => [count(times), `misses.${reason}`, times], { number: true }),
    column("share", ([, times]) => element("span", { class: "full" }, meter(times, all, "miss"), percent(times, all))),
    column("tokens", ([reason]) => [short(counters.missed_tokens?.[reason] ?? 0), `missed_tokens.${reason}`, counters.missed_tokens?.[reason] ?? 0], { number: true, rank: 2, hint: "left to compute" }),
  ], rows, told.info.tenant === null ? "No request missed anything." : "Not told by tenant.");
}

function prefixes() {
  fill(at("prefixes"), [
    column("prefix", (p) => element("code", {}, p.prefix)),
    column("tokens", (p) => [count(p.tokens), `prefix.${p.prefix}.tokens`, p.tokens], { number: true }),
    column("requests", (p) => [count(p.requests), `prefix.${p.prefix}.requests`, p.requests], { number: true, hint: "of the last 1,024 that begin so" }),
    column("found", (p) => percent(p.found_tokens, p.tokens * p.requests), { number: true, hint: "of its tokens, over these requests" }),
    column("model", (p) => p.model ?? "?", { rank: 3, name: true }),
    column("last", (p) => ago(now - p.last), { number: true, rank: 2 }),
  ], told.prefixes, "No two of the last prompts begin alike.");
}

function owners() {
  const held = (tier) => (row) => (row.tiers[tier] ? [bytes(row.tiers[tier].bytes), `tenant.${row.tenant}.${tier}`, row.tiers[tier].bytes] : "");
  const there = TIERS.filter((tier) => told.tenants.some((row) => row.tiers[tier]?.bytes));
  fill(at("tenants"), [
    column("tenant", (row) => row.tenant ?? "not bound here", { name: true }),
    ...there.map((tier, i) => column(tier, held(tier), { number: true, rank: i ? 2 : 1 })),
    column("quota", quota, { rank: 2 }),
    column("asked", (row) => [short(row.asked_tokens), `tenant.${row.tenant}.asked_tokens`, row.asked_tokens], { number: true, rank: 2, hint: "tokens" }),
    column("found", (row) => percent(sum(row.hit_tokens), row.asked_tokens), { number: true }),
  ], told.tenants, "Nobody has used this cache yet.");
  fill(at("agents"), [
    column("agent", (row) => row.agent, { name: true }),
    column("tenant", (row) => row.tenant, { rank: 2, name: true }),
    column("requests", (row) => [count(row.requests), `agent.${row.agent}.requests`, row.requests], { number: true }),
    column("asked", (row) => short(row.asked_tokens), { number: true, rank: 2, hint: "tokens" }),
    column("found", (row) => percent(sum(row.hit_tokens), row.asked_tokens), { number: true }),
    column("last", (row) => ago(now - row.last), { number: true, rank: 2 }),
  ], told.agents.slice(0, 12), "No request named an agent.");
}

// What a tenant may take of each tier, beside what it takes.
function quota(row) {
  const limits = Object.entries(row.quotas ?? {});
  if (!limits.length) return "none";
  return element("span", {}, ...limits.map(([tier, limit]) => element("span", { class: "quota" },
    `${bytes(limit)} of ${tier}`, meter(row.tiers[tier]?.bytes ?? 0, limit, kind(tier)))));
}

function namespaces() {
  const there = TIERS.filter((tier) => told.namespaces.some((row) => row.tiers[tier]));
  fill(at("namespaces"), [
    column("namespace", (row) => element("code", { title: row.id }, row.id.slice(0, 8))),
    column("model", (row) => [row.model, row.adapter].filter(Boolean).join(" + ") || "not bound here", { name: true }),
    column("tenant", (row) => row.tenant ?? "", { rank: 2, name: true }),
    ...there.map((tier) => column(tier, (row) => (row.tiers[tier] ? (row.tiers[tier].bytes ? bytes(row.tiers[tier].bytes) : `${count(row.tiers[tier].records)} records`) : ""), { number: true, rank: tier === "host" ? 1 : 2 })),
    column("requests", (row) => count(row.requests), { number: true, rank: 3 }),
    column("found", (row) => percent(sum(row.hit_tokens), row.asked_tokens), { number: true, rank: 2 }),
    column("last use", (row) => (row.last === null ? "before the start" : ago(now - row.last)), { number: true }),
  ], told.namespaces.slice(0, 20), "No engine has bound a namespace yet.");
}

function events() {
  const chosen = at("kind").value;
  const rows = told.events.filter((event) => !chosen || event.kind === chosen).reverse();
  for (const each of new Set(told.events.map((event) => event.kind))) {
    if (![...at("kind").options].some((option) => option.value === each)) at("kind").append(element("option", { value: each }, each));
  }
  fill(at("events"), [
    column("time", (e) => clock(e.time)),
    column("what", (e) => element("span", { class: e.kind }, e.kind)),
    column("tier", (e) => e.tier),
    column("blocks", (e) => count(e.blocks), { number: true }),
    column("size", (e) => (e.bytes ? bytes(e.bytes) : ""), { number: true, rank: 2 }),
    column("request", (e) => e.request, { rank: 3, name: true }),
    column("why", (e) => e.reason, { rank: 2, name: true }),
  ], rows, "Nothing happened yet.");
}

// buttons and keys

const THEMES = ["system", "light", "dark"];

function theme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  at("theme").textContent = `Theme: ${name}`;
  try {
    localStorage.setItem("theme", name);
  } catch {
    // a browser that keeps nothing
  }
}

function nextTheme() {
  theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % THEMES.length]);
}

function pause() {
  paused = !paused;
  at("pause").setAttribute("aria-pressed", paused);
  at("pause").textContent = paused ? "Go on" : "Pause";
  if (paused) say("paused", `paused at ${clock(now)}`);
}

function kept() {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
}

at("theme").addEventListener("click", nextTheme);
at("pause").addEventListener("click", pause);
at("kind").addEventListener("change", () => told.events && events());
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select")) return;
  if (event.key === "t") nextTheme();
  if (event.key === "p") pause();
});
theme(THEMES.includes(kept()) ? kept() : "system");
turn();
