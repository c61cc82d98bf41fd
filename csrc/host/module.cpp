// The module kvcache._native: checks arguments, releases the interpreter lock and calls the core. It uses no class of
// the Python package. Reference implementations in Python are under kvcache/index/reference and beside the callers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "block_copy.h"
#include "py_buffers.h"

namespace py = pybind11;
using namespace kvcache;

namespace {

using Steps = std::array<i64, MAX_AXES>;

template <Direction direction>
void py_copy(const py::object& bases, const std::array<u64, MAX_AXES>& extents, std::size_t item_bytes, i64 page_step,
             const Steps& page, const Steps& payload, const py::object& page_ids, const py::sequence& payloads,
             unsigned threads, bool plain) {
    const Buffer bases_view(bases, PyBUF_FORMAT), ids_view(page_ids, PyBUF_FORMAT);
    const std::size_t roots = bases_view.integers("LQ", 8, "unsigned 64-bit integers");
    const std::size_t blocks = ids_view.integers("lq", 8, "signed 64-bit integers");
    expect(roots == extents[0] * extents[1], std::to_string(roots) + " bases: expected one a layer, of K and of V");
    expect(payloads.size() == blocks, std::to_string(payloads.size()) + " payloads: expected one for each of the " +
                                          std::to_string(blocks) + " pages");
    Geometry geometry{};
    geometry.bases = reinterpret_cast<const std::uint64_t*>(bases_view.data());
    geometry.page_step = page_step;
    geometry.item_bytes = item_bytes;
    for (int i = 0; i < MAX_AXES; ++i) {
        geometry.extents[i] = extents[i], geometry.page[i] = page[i], geometry.payload[i] = payload[i];
    }
    std::deque<Buffer> views;  // keeps the objects until the copy is done
    std::vector<std::uint8_t*> starts;
    for (std::size_t i = 0; i < blocks; ++i) {
        const Buffer& view =
            views.emplace_back(payloads[i], direction == Direction::Gather ? PyBUF_WRITABLE : PyBUF_SIMPLE);
        expect(view.bytes() == geometry.block_bytes(), "payload " + std::to_string(i) + " of " +
                                                           std::to_string(view.bytes()) + " bytes: expected " +
                                                           std::to_string(geometry.block_bytes()));
        starts.push_back(view.data());
    }
    py::gil_scoped_release unlocked;
    copy_blocks(direction, geometry, reinterpret_cast<const std::int64_t*>(ids_view.data()), starts.data(), blocks,
                threads, plain);
}

void py_populate(const py::object& memory) {
    constexpr std::size_t PAGE = 4096, STEP = 2 << 20;  // smaller steps let other threads map memory, such as a stack
    constexpr int POPULATE_WRITE = 23;                  // Linux 5.14, newer than some headers
    const Buffer view(memory, PyBUF_WRITABLE);
    py::gil_scoped_release unlocked;
    const std::size_t skipped = (PAGE - reinterpret_cast<std::uintptr_t>(view.data()) % PAGE) % PAGE;
    for (std::size_t at = skipped; at < view.bytes(); at += STEP) {
        const std::size_t bytes = std::min(STEP, view.bytes() - at);
        if (madvise(view.data() + at, bytes, POPULATE_WRITE) != 0) return;
    }
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "The compiled core of kvcache.";
    bind_chain(module);
    bind_index(module);
    bind_replay(module);
    module.def("populate", &py_populate, py::arg("memory"),
               R"(Have the system find this memory (a writable buffer) now, not at its first touch.

Changes nothing in it; where the system cannot, nothing happens. Releases the interpreter lock.)");
    auto def_copy = [&](const char* name, auto function, const char* doc) {
        module.def(name, function, py::arg("bases"), py::arg("extents"), py::arg("item_bytes"), py::arg("page_step"),
                   py::arg("page"), py::arg("payload"), py::arg("page_ids"), py::arg("payloads"), py::arg("threads"),
                   py::kw_only(), py::arg("plain") = false, doc);
    };
    def_copy("gather", &py_copy<Direction::Gather>, R"(Copy pages to payloads.

Axes are layer, K or V, token, head, element. `bases`, a buffer of uint64 by (layer, K or V), holds addresses of page 0;
`page` and `payload` are each axis's step in bytes (the first two of `page` go unread, `bases` says it). `page_ids` is a
buffer of int64; `payloads[i]` a contiguous buffer of the block's bytes. On as many as `threads` threads; `plain` keeps
to memcpy. Releases the interpreter lock. Addresses, steps and ids are taken on trust.)");
    def_copy("scatter", &py_copy<Direction::Scatter>,
             "Copy payloads to pages; arguments as for `gather`. No two of the pages may be the same.");
}
