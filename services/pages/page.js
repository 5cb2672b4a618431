"use strict"
// A definition in place: frames of the pages that have it, which show only what is asked for, in a panel at its link.
const framed = self !== top, panel = document.querySelector("aside")
let timer, over

function open(link) {
  const pages = (link.dataset.pages ?? link.getAttribute("href")).replaceAll("#", "?").split(" ")
  panel.innerHTML = pages.map(page => `<iframe src="${page}" title=definition></iframe>`).join("")
  panel.showPopover({ source: link })
}
addEventListener("click", event => {
  const link = event.target.closest("main a[href*='#']")
  if (framed || !link || event.ctrlKey || event.metaKey) return
  event.preventDefault()
  open(link)
  panel.firstChild.focus()
})
addEventListener("mousemove", event => {
  const link = event.target.closest("a[data-pages]")
  if (framed || link === over || panel.matches(":hover, :focus-within")) return
  clearTimeout(timer)
  over = link
  timer = setTimeout(() => link ? open(link) : panel.hidePopover(), link ? 150 : 400)
})
addEventListener("message", ({ data, source }) => {  // from a frame: how high it is, or that Escape is pressed there
  if (!data) panel.hidePopover()
  for (const frame of panel.children) if (frame.contentWindow === source) frame.height = data
})
if (framed) {
  const asked = (location.search || location.hash).slice(1), title = document.querySelector("h1 a")
  document.body.className = "framed"
  document.getElementById(asked)?.classList.add("asked")
  title.append("." + asked)
  title.hash = asked
  parent.postMessage(document.body.scrollHeight, "*")
  addEventListener("keydown", event => event.key === "Escape" && parent.postMessage(0, "*"))
  addEventListener("hashchange", () => location.reload())
}

// A picture that moves: the boxes of the chosen frame, as far as its moment has come, and the note of the chosen box.
for (const form of framed ? [] : document.forms) {
  const [text, stage, says, data] = form.querySelectorAll("p, .stage, output, script"), { moment, play } = form
  const frames = JSON.parse(data.textContent)
  let frame

  function tell() {
    const chosen = frame.boxes[stage.querySelector(":checked")?.value], linked = chosen?.[6] ?? []
    const others = linked.map(n => frame.linked + frame.boxes[n][5].split("\n")[0])
    stage.querySelectorAll("label").forEach((box, n) => box.classList.toggle("linked", linked.includes(n)))
    stage.style.setProperty("--moment", moment.value)
    says.textContent = [frame.moments[moment.value], chosen?.[5], ...others].filter(Boolean).join("\n")
  }
  function draw() {
    frame = frames[Array.from(form.querySelectorAll("select"), select => select.value).join("/")]
    const rows = frame.rows.map((name, y) => `<span style="grid-row: ${y + 1}">${name}</span>`)
    const boxes = frame.boxes.map(([y, x, width, colour, label, , , since], n) => `<label style="--since: ${since};
      --colour: ${colour}; grid-area: ${y + 1} / ${x + 2} / auto / span ${width}"><input type=radio name=box value=${n}>
      ${label}</label>`)
    text.textContent = frame.text
    stage.style = `--rows: ${rows.length}; --columns: ${frame.width}`
    stage.innerHTML = [...rows, ...boxes].join("")
    moment.value = moment.max = frame.moments.length - 1
    moment.disabled = play.disabled = frame.moments.length < 2
    tell()
  }
  form.addEventListener("input", event => event.target.matches("select") ? draw() : tell())
  stage.addEventListener("mouseover", event => event.target.control?.click())
  setInterval(() => {
    if (!play.checked) return
    moment.value = (+moment.value + 1) % frame.moments.length
    tell()
  }, 400)
  draw()
}
