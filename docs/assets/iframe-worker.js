/* Browsers start no worker from a file:// address, and the search of this book is one. Here it is a hidden frame. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      this.ready = new Promise((loaded) => (this.loaded = loaded));
      window.addEventListener("message", (event) => {
        if (event.source !== inside) return;
        event.stopImmediatePropagation();
        this.dispatchEvent(new MessageEvent("message", { data: event.data }));
        if (this.onmessage) this.onmessage(event);
      });
      inside.document.open();
      inside.document.write("<html><body></body></html>");
      inside.document.close();
      const say = inside.document.createElement("script");
      say.textContent = "postMessage = (data) => parent.postMessage(data, '*');";
      inside.document.body.appendChild(say);
      const work = inside.document.createElement("script");
      work.src = url;
      work.onload = this.loaded;
      inside.document.body.appendChild(work);
    }
    postMessage(data) {
      this.ready.then(() =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
    }
    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
