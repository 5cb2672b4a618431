"use strict"
// Definitions in place: a name's panel shows the lines that define it, whose names lead on inside the panel.
const panel = document.getElementById("panel"), trail = []
let from, timer, pinned

function fill() {
  const parts = trail.at(-1).split(" ").map(n => {
    const [module, name, start, end, users] = DEFS[n]
    return `<h2><a href="${module}.html#${name}">${module.replace(".", "/")}.py:${start} <b>${name}</b></a></h2>` +
      `<p class=used>Named by: ${users || "none"}</p><pre class=code>${LINES[module].slice(start - 1, end).join("\n")}</pre>`
  })
  panel.innerHTML = (trail.length > 1 ? "<button>Back</button> " : "") + "<button>Close</button>" + parts.join("")
  panel.scrollTop = 0
}
function open(link, pin) {
  from = link, pinned = pin
  trail.splice(0, trail.length, link.dataset.d)
  fill()
  panel.hidden = false
  const box = link.getBoundingClientRect(), low = box.top > innerHeight - box.bottom
  panel.style.top = low ? "" : `${box.bottom + 2}px`
  panel.style.bottom = low ? `${innerHeight - box.top + 2}px` : ""
  panel.style.maxHeight = `${(low ? box.top : innerHeight - box.bottom) - 12}px`
  panel.style.left = `${Math.max(4, Math.min(box.left, document.body.clientWidth - panel.offsetWidth - 8))}px`
  if (pin) panel.focus({ preventScroll: true })
}
function close(back) {
  panel.hidden = true
  if (back) from?.focus({ preventScroll: true })
}
document.addEventListener("click", event => {
  const link = event.target.closest("a[data-d]"), inside = panel.contains(event.target)
  if (link && !event.ctrlKey && !event.metaKey) {
    event.preventDefault()
    if (inside) trail.push(link.dataset.d), fill(), panel.focus()
    else open(link, true)
  } else if (inside && event.target.textContent === "Back") trail.pop(), fill(), panel.focus()
  else if (!inside || event.target.textContent === "Close") close(inside)
})
document.addEventListener("mouseover", event => {
  const link = event.target.closest("a[data-d]"), inside = panel.contains(event.target)
  clearTimeout(timer)
  if (link && !inside && !(pinned && !panel.hidden)) timer = setTimeout(open, 150, link, false)
  else if (!inside && !pinned) timer = setTimeout(close, 400)
})
document.addEventListener("keydown", event => event.key === "Escape" && !panel.hidden && close(true))

// Pictures that move: boxes on rows, and areas, as the data say; a moment is chosen, or played.
for (const figure of document.querySelectorAll("figure")) {
  const { choices, frames, first } = PICTURES[figure.dataset.picture], names = Object.keys(choices)
  const option = value => `<option>${value}</option>`
  const selects = names.map(n => `<label>${n.replace("_", "-")} <select name=${n}>${choices[n].map(option)}</select></label>`)
  figure.innerHTML = `<form>${selects.join(" ")} <label>moment <input name=moment type=range min=0></label>
    <button type=button>Play</button></form><p></p><div class=stage tabindex=0 role=group aria-label="boxes; arrow keys
    go from one to the next"></div><output aria-live=polite></output><p class=note></p>`
  const [form, text, stage, output, note] = figure.children, field = form.elements
  first.split("/").forEach((value, n) => field[names[n]].value = value)
  let frame, boxes, chosen, clock
  const choose = n => {
    if (!frame.boxes?.[chosen = n]) return
    const [, , , , , says, linked] = frame.boxes[n]
    boxes.forEach((box, i) => box.classList.toggle("chosen", i === n) | box.classList.toggle("linked", linked.includes(i)))
    const [name, x, w] = [says, frame.boxes[n][1], frame.boxes[n][2]], needs = frame.boxes[linked[0]]
    note.textContent = !frame.timed ? name : `${name}: time ${x} to ${x + w}` +
      (needs ? `. Waits for ${needs[5]}, done at ${needs[1] + needs[2]}` : "")
  }
  const tick = () => {
    const t = +field.moment.value
    output.textContent = frame.texts?.[t] ?? ""
    stage.style.setProperty("--t", t / Math.max(1, field.moment.max))
    boxes.forEach((box, i) => {
      const [, , w, , , , , since] = frame.boxes[i]
      box.classList.toggle("later", t < since)
      box.classList.toggle("now", t >= since && t < since + w)
    })
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
  stage.addEventListener("mouseover", event => event.target.closest("b") && choose(+event.target.closest("b").dataset.n))
  stage.addEventListener("click", event => event.target.closest("b") && choose(+event.target.closest("b").dataset.n))
  stage.addEventListener("keydown", event => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 }[event.key]
    if (!step || !frame.boxes) return
    event.preventDefault()
    const [y, x] = frame.boxes[chosen] ?? [0, -1], down = event.key === "ArrowUp" || event.key === "ArrowDown"
    const far = ([row, at]) => down ? (row === y + step ? Math.abs(at - x) : 1e9) : row === y && (at - x) * step > 0 ? (at - x) * step : 1e9
    const best = frame.boxes.reduce((a, box, n) => far(box) < far(frame.boxes[a] ?? [-9, 0]) ? n : a, -1)
    if (best >= 0) choose(best)
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
