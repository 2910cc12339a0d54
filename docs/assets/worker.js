// Pages that are opened as files may start no workers. A hidden frame stands in for the one of the search.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.ready = new Promise(done => {
        frame.onload = () => {
          const inside = frame.contentWindow
          inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          inside.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => load(inside, each)), Promise.resolve())
          load(inside, url).then(() => done(inside))
        }
      })
      document.body.append(frame)
    }
    postMessage(data) {
      this.ready.then(inside => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
    terminate() {}
    set onmessage(listener) { this.addEventListener("message", listener) }
  }
  const load = (inside, url) => new Promise((done, failed) => {
    const script = inside.document.createElement("script")
    script.onload = done
    script.onerror = failed
    script.src = url
    inside.document.body.append(script)
  })
}
