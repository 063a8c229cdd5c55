// Code and tables that scroll can be reached and scrolled by the keyboard; headings of the menu say their level.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".highlight pre, .table-wrapper, div.math").forEach((box) => {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  });
  document.querySelectorAll(".caption[role=heading]").forEach((title) => title.setAttribute("aria-level", "2"));
});
