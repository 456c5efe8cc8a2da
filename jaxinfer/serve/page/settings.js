// The sampling form. Empty fields are left out of requests, so the server's defaults hold.

import { byId } from "./dom.js";

const KEY = "jaxinfer.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

export class Settings {
  constructor() {
    this.form = byId("settings");
    this.restore();
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", () => this.save());
    byId("reset").addEventListener("click", () => {
      this.form.reset();
      this.save();
    });
  }

  field(name) {
    return this.form.elements.namedItem(name);
  }

  system() {
    return this.field("system").value.trim();
  }

  // The fields that are set and valid; what is not valid is marked in the form.
  sampling() {
    const set = NUMBERS.map((name) => this.field(name)).filter((field) => field.value !== "" && field.validity.valid);
    return Object.fromEntries(set.map((field) => [field.name, field.valueAsNumber]));
  }

  save() {
    const values = Object.fromEntries(["system", ...NUMBERS].map((name) => [name, this.field(name).value]));
    localStorage.setItem(KEY, JSON.stringify(values));
  }

  restore() {
    let values = {};
    try {
      values = JSON.parse(localStorage.getItem(KEY)) ?? {};
    } catch {
      localStorage.removeItem(KEY);
    }
    for (const [name, value] of Object.entries(values)) {
      if (this.field(name)) this.field(name).value = value;
    }
  }
}
