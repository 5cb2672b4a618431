"use strict"
// A definition in place: a name's panel shows the lines that define it, whose names open panels on top of it.
// The browser places a panel by its name, and closes it by Escape or a click elsewhere.
let timer

function open(link) {
  const below = link.closest("aside") ?? document.body, definitions = link.dataset.d.split(" ").map(n => {
    const [module, name, start, end, users] = DEFS[n]
    return `<h2><a href="${module}.html#${name}">${module.replace(".", "/")}.py:${start} ${name}</a></h2>
      <p>Named by: ${users || "none"}</p>
      <pre class=code>${LINES[module].slice(start - 1, end).join("\n")}</pre>`
  })
  below.insertAdjacentHTML("beforeend",
    `<aside popover tabindex=-1 role=dialog aria-label=definition>${definitions.join("")}</aside>`)
  const panel = below.lastElementChild
  panel.addEventListener("beforetoggle", event => {
    if (event.newState === "closed" && panel.matches(":focus-within")) link.focus()
  })
  panel.addEventListener("toggle", event => event.newState === "closed" && panel.remove())
  panel.showPopover({ source: link })
  return panel
}
document.addEventListener("click", event => {
  const link = event.target.closest("a[data-d]")
  if (!link || event.ctrlKey || event.metaKey) return
  event.preventDefault()
  open(link).focus()
})
document.addEventListener("mouseover", event => {
  const link = event.target.closest("a[data-d]")
  clearTimeout(timer)
  if (document.querySelector("aside:hover, aside:focus-within")) return
  timer = setTimeout(() => link ? open(link) : document.querySelector("aside")?.hidePopover(), link ? 150 : 400)
})

// A picture that moves: the boxes of the chosen frame, as far as its moment has come, and the note of the chosen box.
for (const form of document.forms) {
  const [text, stage, says] = form.querySelectorAll("p, .stage, output"), { moment, play } = form
  let frame, boxes, clock

  function tell() {
    const chosen = frame.boxes[stage.querySelector(":checked")?.value], linked = chosen?.[6] ?? []
    boxes.forEach((box, n) => {
      box.classList.toggle("later", moment.value < frame.boxes[n][7])
      box.classList.toggle("linked", linked.includes(n))
    })
    const others = linked.map(n => frame.linked + frame.boxes[n][5].split("\n")[0])
    says.textContent = [frame.moments[moment.value], chosen?.[5], ...others].filter(Boolean).join("\n")
  }
  function draw() {
    frame = FRAMES[Array.from(form.querySelectorAll("select"), select => select.value).join("/")]
    const rows = frame.rows.map((name, y) => `<span style="grid-row: ${y + 1}">${name}</span>`)
    const labels = frame.boxes.map(([y, x, width, colour, label, , , , height], n) =>
      `<label style="grid-area: ${y + 1} / ${x + 2} / auto / span ${width}; --colour: ${colour}; height: ${100 * height}%">
       <input type=radio name=box value=${n}>${label}</label>`)
    text.textContent = frame.text
    stage.style = `--rows: ${rows.length}; --columns: ${frame.width}`
    stage.innerHTML = [...rows, ...labels].join("")
    boxes = stage.querySelectorAll("label")
    moment.value = moment.max = frame.moments.length - 1
    moment.disabled = play.disabled = frame.moments.length < 2
    tell()
  }
  form.addEventListener("input", event => {
    clearInterval(clock)
    event.target.matches("select") ? draw() : tell()
  })
  stage.addEventListener("mouseover", event => {
    const box = event.target.closest("label")
    if (!box) return
    box.control.checked = true
    tell()
  })
  play.addEventListener("click", () => {
    clearInterval(clock)
    moment.value = 0
    tell()
    clock = setInterval(() => {
      if (moment.value === moment.max) return clearInterval(clock)
      moment.stepUp()
      tell()
    }, 400)
  })
  draw()
}
