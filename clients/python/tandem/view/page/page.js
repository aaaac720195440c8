"use strict";

// Most responses that are drawn at once, however many the run has.
const PAGE_SIZE = 50;
// Nats at which a shade is full.
const FULL_GAP = 3;
const FULL_LOGPROB = 5;

const form = document.getElementById("filters");
const list = document.getElementById("list");
const place = document.getElementById("place");

// Every response with its group, in the order of the files.
const samples = [];
for (const block of document.querySelectorAll("script.step")) {
  for (const group of JSON.parse(block.textContent)) {
    for (const sample of group.samples) {
      const anchor = `step-${group.step}/${group.group_id}/${sample.sample_index}`;
      samples.push({ group, sample, anchor, text: null, gap: null });
    }
  }
  block.remove();
}
let found = samples;
let first = 0;

function element(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  // Text alone: what a model wrote is never read as HTML.
  if (text !== undefined) made.textContent = text;
  return made;
}

// Control characters, and those that reorder text, by their codes; line feeds stay.
function visible(text) {
  return text.replace(/[^\P{C}\n]/gu, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
}

function responseText(one) {
  one.text ??= one.sample.token_texts.join("").toLowerCase();
  return one.text;
}

function bound(name, otherwise) {
  const value = form.elements[name].valueAsNumber;
  return Number.isNaN(value) ? otherwise : value;
}

// One of them is named in the singular.
function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

// Mean absolute log-prob gap of a response; 0 where none is known.
function meanGap(one) {
  if (one.gap === null) {
    const gaps = one.sample.response_token_ids.map((_, t) => gapOf(one.sample, t)).filter((g) => g !== null);
    one.gap = gaps.length ? gaps.reduce((sum, g) => sum + Math.abs(g), 0) / gaps.length : 0;
  }
  return one.gap;
}

// Orders by the smallest key first; responses without a reward come last in both orders.
const keys = {
  worst: (one) => one.sample.reward ?? Infinity,
  best: (one) => (one.sample.reward === null ? Infinity : -one.sample.reward),
  short: (one) => one.sample.response_token_ids.length,
  long: (one) => -one.sample.response_token_ids.length,
  surprising: (one) => -meanGap(one),
};

function sorted(all) {
  const key = keys[form.elements.order.value];
  if (!key) return all;
  return all.map((one) => [key(one), one]).sort(([a], [b]) => (a === b ? 0 : a < b ? -1 : 1)).map(([, one]) => one);
}

function filter() {
  const [from, to] = [bound("first", -Infinity), bound("last", Infinity)];
  const [least, most] = [bound("least", -Infinity), bound("most", Infinity)];
  const anyReward = least === -Infinity && most === Infinity;
  const text = form.elements.text.value.toLowerCase();
  const admitted = samples.filter((one) => {
    const { step } = one.group;
    const { reward } = one.sample;
    return (
      step >= from && step <= to &&
      (anyReward || (reward !== null && reward >= least && reward <= most)) &&
      (!text || responseText(one).includes(text))
    );
  });
  found = sorted(admitted);
  first = 0;
  draw();
}

function juniorLogprob(sample, t) {
  return sample.junior_logprobs ? sample.junior_logprobs[t] : null;
}

function seniorLogprob(sample, t) {
  return sample.senior_logprobs ? sample.senior_logprobs[t] : null;
}

function gapOf(sample, t) {
  const senior = seniorLogprob(sample, t);
  const junior = juniorLogprob(sample, t);
  return senior === null || junior === null ? null : senior - junior;
}

const AUTHORS = ["junior", "senior", "environment"];

function authorOf(sample, t) {
  return AUTHORS[sample.authorship_mask[t]];
}

function writerLogprob(sample, t) {
  return authorOf(sample, t) === "junior" ? juniorLogprob(sample, t) : seniorLogprob(sample, t);
}

function shade(span, sample, t, kind) {
  const value = kind === "gap" ? gapOf(sample, t) : writerLogprob(sample, t);
  if (value === null) return;
  const name = kind === "gap" ? (value > 0 ? "more" : "less") : "unlikely";
  const full = kind === "gap" ? FULL_GAP : FULL_LOGPROB;
  span.classList.add(name);
  span.style.setProperty("--shade", Math.min(1, Math.abs(value) / full).toFixed(3));
}

function isDraft(sample, t) {
  return sample.accepted_draft_mask !== null && sample.accepted_draft_mask[t] === 1;
}

function draftCount(sample) {
  if (sample.accepted_draft_mask === null) return "no drafts asked for";
  const count = sample.accepted_draft_mask.reduce((sum, one) => sum + one, 0);
  return counted(count, "accepted draft");
}

function number(value, digits) {
  return value === null ? "-" : value.toFixed(digits);
}

function signed(value, digits) {
  return value === null ? "-" : (value < 0 ? "" : "+") + value.toFixed(digits);
}

function tokenTable(sample) {
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const name of ["", "token", "id", "author", "draft", "senior", "junior", "gap"]) {
    head.append(element("th", { token: "text", author: "author", draft: "author" }[name] ?? "", name));
  }
  const body = table.createTBody();
  sample.response_token_ids.forEach((id, t) => {
    const row = body.insertRow();
    const author = authorOf(sample, t);
    const text = visible(sample.token_texts[t]).replaceAll("\n", "\\n");
    row.append(
      element("td", "", t),
      element("td", `text token ${author}`, text),
      element("td", "", id),
      element("td", "author", author),
      element("td", "author", isDraft(sample, t) ? "accepted" : ""),
      element("td", "", number(seniorLogprob(sample, t), 3)),
      element("td", "", number(juniorLogprob(sample, t), 3)),
      element("td", "", signed(gapOf(sample, t), 3)),
    );
  });
  return table;
}

function tokenDetails(sample) {
  const details = element("details", "tokens");
  details.append(element("summary", "", counted(sample.response_token_ids.length, "token")));
  details.addEventListener("toggle", () => {
    if (details.children.length > 1) return;
    const scroller = document.createElement("div");
    scroller.append(tokenTable(sample));
    details.append(scroller);
  });
  return details;
}

function drawSample({ sample, anchor }, kind) {
  const box = element("div", "sample");
  box.id = anchor;
  const link = element("a", "sample-name", `sample ${sample.sample_index}, ${sample.finish_reason}`);
  link.setAttribute("href", `#${encodeURIComponent(anchor)}`);
  const about = element("div", "about");
  about.append(
    element("strong", "", number(sample.reward, 2)),
    element("span", "advantage", signed(sample.advantage, 2)),
    ...Object.entries(sample.scores).map(([name, score]) =>
      element("span", "score", `${visible(name)} ${number(score, 2)}`)),
    element("span", "drafts", draftCount(sample)),
    ...(sample.turns > 1 ? [element("span", "score", counted(sample.turns, "turn"))] : []),
    link,
  );
  const response = element("div", "response");
  // The environment's tokens between two turns are a block of their own.
  let block = response;
  sample.token_texts.forEach((text, t) => {
    const author = authorOf(sample, t);
    if (author !== "environment") {
      block = response;
    } else if (block === response) {
      block = element("div", "said");
      response.append(block);
    }
    const draft = isDraft(sample, t) ? " draft" : "";
    const span = element("span", `token ${author}${draft}`, visible(text));
    if (kind !== "none") shade(span, sample, t, kind);
    block.append(span);
  });
  const body = document.createElement("div");
  body.append(response, tokenDetails(sample));
  box.append(about, body);
  return box;
}

function rowList(columns) {
  const rows = element("dl", "row");
  for (const [name, value] of columns) {
    rows.append(element("dt", "", visible(name)), element("dd", "", visible(value)));
  }
  return rows;
}

function imageList(urls) {
  const images = element("div", "images");
  for (const url of urls) {
    const image = document.createElement("img");
    image.setAttribute("alt", "image of the prompt");
    image.setAttribute("src", url);
    images.append(image);
  }
  return images;
}

function drawCurve(name, points) {
  const figure = document.createElement("figure");
  const [width, height] = [288, 80];
  const values = points.map(([, value]) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [from, to] = [points[0][0], points[points.length - 1][0]];
  const x = (step) => (to === from ? width / 2 : ((step - from) / (to - from)) * width);
  const y = (value) => (high === low ? height / 2 : height - ((value - low) / (high - low)) * height);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", name);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", points.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join(""));
  svg.append(path);
  const last = values[values.length - 1];
  figure.append(svg, element("figcaption", "",
    `${name}: ${values[0].toPrecision(3)} at step ${from}, ${last.toPrecision(3)} at step ${to}`));
  return figure;
}

// Shows the response that the address names, without filters if they hide it.
function follow() {
  const anchor = decodeURIComponent(location.hash.slice(1));
  if (!anchor) return;
  let at = found.findIndex((one) => one.anchor === anchor);
  if (at < 0) {
    if (!samples.some((one) => one.anchor === anchor)) return;
    for (const name of ["first", "last", "least", "most", "text"]) form.elements[name].value = "";
    form.elements.order.value = "file";
    found = samples;
    at = found.findIndex((one) => one.anchor === anchor);
  }
  first = at - (at % PAGE_SIZE);
  draw();
  const box = document.getElementById(anchor);
  box.classList.add("linked");
  box.scrollIntoView();
}

function draw() {
  const kind = form.elements.shade.value;
  document.body.className = `shade-${kind}`;
  for (const name of ["advantage", "drafts"]) {
    document.body.classList.toggle(`show-${name}`, form.elements[name].checked);
  }
  const shown = found.slice(first, first + PAGE_SIZE);
  list.replaceChildren();
  let group = null;
  let article = null;
  for (const one of shown) {
    if (one.group !== group) {
      group = one.group;
      article = document.createElement("article");
      const title = element("h2", "", group.group_id);
      if (group.place) title.append(element("span", "place", visible(group.place)));
      article.append(title, element("div", "prompt", visible(group.prompt)));
      if (group.images.length) article.append(imageList(group.images));
      if (group.columns.length) article.append(rowList(group.columns));
      list.append(article);
    }
    article.append(drawSample(one, kind));
  }
  const range = shown.length ? `${first + 1} to ${first + shown.length} of ` : "";
  const all = found.length === samples.length ? "" : ` (${samples.length.toLocaleString("en")} in all)`;
  place.textContent = `${range}${counted(found.length, "response")}${all}`;
  for (const button of document.querySelectorAll("[data-turn]")) {
    const next = first + button.dataset.turn * PAGE_SIZE;
    button.disabled = next < 0 || next >= found.length;
  }
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-turn]");
  if (!button) return;
  first += button.dataset.turn * PAGE_SIZE;
  draw();
  scrollTo(0, 0);
});
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(filter));
addEventListener("hashchange", follow);
form.addEventListener("input", (event) => {
  if (["shade", "advantage", "drafts"].includes(event.target.name)) draw();
  else filter();
});

const run = JSON.parse(document.getElementById("run").textContent);
document.title = `${run.name}: trajectories`;
document.getElementById("name").textContent = `${run.name}: trajectories by author`;
for (const [name, value] of run.facts) {
  document.getElementById("facts").append(element("dt", "", visible(name)), element("dd", "", visible(value)));
}
for (const [name, points] of Object.entries(run.curves)) {
  if (points.length > 1) document.getElementById("curves").append(drawCurve(name, points));
}
// The values that Clear restores.
form.elements.advantage.defaultChecked = run.advantage;
form.elements.drafts.defaultChecked = run.drafts;
for (const choice of form.elements.shade) choice.defaultChecked = choice.value === run.shade;
form.reset();
setTimeout(follow);
