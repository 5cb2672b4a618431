"use strict"
// Definitions in place: a name's panel shows the lines that define it, whose names lead on inside the panel.
// The browser places the panel by its name, closes it by Escape or a click elsewhere, and then restores the focus.
const panel = document.getElementById("panel")
let trail = [], timer, pinned

function show(ids) {
  trail = ids
  panel.innerHTML = (trail.length > 1 ? "<button>Back</button> " : "") +
    "<button popovertarget=panel popovertargetaction=hide>Close</button>"
  for (const n of trail.at(-1).split(" ")) {
    const [module, name, start, end, users] = DEFS[n]
    panel.innerHTML += `<h2><a href="${module}.html#${name}">${module.replace(".", "/")}.py:${start} <b>${name}</b></a></h2>
      <p class=used>Named by: ${users || "none"}</p><pre class=code>${LINES[module].slice(start - 1, end).join("\n")}</pre>`
  }
  panel.scrollTop = 0
  if (pinned) panel.focus()
}
function open(link, pin) {
  panel.hidePopover()
  pinned = pin
  panel.showPopover({ source: link })
  show([link.dataset.d])
}
document.addEventListener("click", event => {
  const link = event.target.closest("a[data-d]"), inside = panel.contains(event.target)
  if (link && !event.ctrlKey && !event.metaKey) {
    event.preventDefault()
    inside ? show([...trail, link.dataset.d]) : open(link, true)
  } else if (event.target.textContent === "Back") show(trail.slice(0, -1))
})
document.addEventListener("mouseover", event => {
  const link = event.target.closest("a[data-d]"), inside = panel.contains(event.target)
  clearTimeout(timer)
  if (inside || (pinned && panel.matches(":popover-open"))) return
  timer = link ? setTimeout(open, 150, link, false) : setTimeout(() => panel.hidePopover(), 400)
})

// Pictures that move: boxes on rows, and areas, as the data say; a moment is chosen, or played.
for (const figure of document.querySelectorAll("figure")) {
  const { choices, frames, first } = PICTURES[figure.dataset.picture], names = Object.keys(choices)
  const selects = names.map(n => `<label>${n.replace("_", "-")} <select name=${n}>
    ${choices[n].map(value => `<option>${value}</option>`)}</select></label>`)
  figure.innerHTML = `<form>${selects.join(" ")} <label>moment <input name=moment type=range min=0></label>
    <button type=button>Play</button></form><p></p><div class=stage tabindex=0 role=group aria-label="boxes; arrow keys
    go from one to the next"></div><output aria-live=polite></output><p class=note></p>`
  const [form, text, stage, output, note] = figure.children, field = form.elements
  first.split("/").forEach((value, n) => field[names[n]].value = value)
  let frame, boxes, chosen, clock
  const choose = n => {
    if (!frame.boxes?.[chosen = n]) return
    const [, x, w, , , says, linked] = frame.boxes[n], needs = frame.boxes[linked[0]]
    boxes.forEach((box, i) => box.classList.toggle("chosen", i === n) | box.classList.toggle("linked", linked.includes(i)))
    note.textContent = !frame.timed ? says : `${says}: time ${x} to ${x + w}` +
      (needs ? `. Waits for ${needs[5]}, done at ${needs[1] + needs[2]}` : "")
  }
  const tick = () => {
    const t = +field.moment.value
    output.textContent = frame.texts?.[t] ?? ""
    stage.style.setProperty("--t", t / Math.max(1, field.moment.max))
    boxes.forEach((box, i) => box.classList.toggle("later", t < frame.boxes[i].at(-1)))
  }
  const draw = () => {
    frame = frames[names.map(n => field[n].value).join("/")]
    const { rows = [], width = 1, areas = [], texts = [] } = frame
    text.textContent = frame.text
    note.innerHTML = areas.map(([kind, , name]) => `<mark class=${kind}>${name}</mark>`).join(" ")
    stage.style = `--rows:${rows.length};--width:${width}`
    stage.innerHTML = rows.map((row, n) => `<span style="--y:${n}">${row}</span>`).join("") +
      (frame.boxes ?? []).map(([y, x, w, kind, label], n) =>
        `<b class=${kind} data-n=${n} style="--y:${y};--x:${x};--w:${w}"><i>${label}</i></b>`).join("") +
      (areas.length ? `<svg viewBox="0 0 100 100" preserveAspectRatio=none>${areas.map(([kind, points]) =>
        `<polygon class=${kind} points="${points}" />`).join("")}</svg><hr>` : "")
    stage.hidden = !rows.length && !areas.length
    boxes = stage.querySelectorAll("b")
    field.moment.max = Math.max(0, texts.length - 1)
    field.moment.value = field.moment.max
    form.classList.toggle("still", texts.length < 2)
    chosen = -1
    tick()
  }
  for (const kind of ["mouseover", "click"])
    stage.addEventListener(kind, event => event.target.closest("b") && choose(+event.target.closest("b").dataset.n))
  stage.addEventListener("keydown", event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key]
    if (!step || !frame.boxes) return
    event.preventDefault()
    choose(Math.max(0, Math.min(chosen + step, boxes.length - 1)))
  })
  form.addEventListener("input", event => event.target === field.moment ? tick() : draw())
  form.querySelector("button").addEventListener("click", () => {
    clearInterval(clock)
    field.moment.value = 0
    tick()
    clock = setInterval(() => +field.moment.value < +field.moment.max ? (field.moment.value++, tick()) : clearInterval(clock), 400)
  })
  draw()
}
