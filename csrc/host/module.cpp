// The module kvcache._native: checks what Python hands over, lets go of the interpreter lock, calls the core.
// Knows no Python objects of ours; its plain twins live beside its callers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "chain.h"
#include "copy.h"

namespace py = pybind11;
using namespace kvcache;

namespace {

// A contiguous view of an object's memory; the object cannot free or resize it meanwhile.
class Buffer {
  public:
    Buffer(const py::handle& object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS | flags) != 0) throw py::error_already_set();
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    std::uint8_t* data() const { return static_cast<std::uint8_t*>(view_.buf); }
    std::size_t bytes() const { return static_cast<std::size_t>(view_.len); }

    // The number of integers, after a look at their type: `codes` are the format letters that will do.
    std::size_t integers(const char* codes, std::size_t size, const char* expected) const {
        const char* format = view_.format ? view_.format : "B";
        if (*format == '@' || *format == '=' || *format == '<') ++format;
        const bool right = std::strlen(format) == 1 && std::strchr(codes, *format);
        if (!right || static_cast<std::size_t>(view_.itemsize) != size) {
            throw py::type_error("a buffer of format '" + std::string(format) + "': expected " + expected);
        }
        return bytes() / size;
    }

  private:
    Py_buffer view_;
};

void expect(bool held, const std::string& message) {
    if (!held) throw py::value_error(message);
}

py::bytes py_digest_chain(const py::bytes& parent, const py::object& tokens, std::size_t block_tokens,
                          const std::optional<std::vector<py::bytes>>& extras, bool plain) {
    const Buffer parent_view(parent, PyBUF_SIMPLE), tokens_view(tokens, PyBUF_FORMAT);
    expect(parent_view.bytes() == SHA_DIGEST,
           "a parent of " + std::to_string(parent_view.bytes()) + " bytes: expected 32");
    expect(block_tokens > 0, "block_tokens = 0: expected at least 1");
    const std::size_t blocks = tokens_view.integers("IL", 4, "unsigned 32-bit integers") / block_tokens;
    std::vector<Bytes> extra_bytes;
    if (extras) {
        expect(extras->size() == blocks, std::to_string(extras->size()) + " extras: expected one for each of the " +
                                             std::to_string(blocks) + " full blocks");
        for (const py::bytes& extra : *extras) {
            extra_bytes.push_back({reinterpret_cast<const std::uint8_t*>(PyBytes_AS_STRING(extra.ptr())),
                                   static_cast<std::size_t>(PyBytes_GET_SIZE(extra.ptr()))});
        }
    }
    py::bytes out(nullptr, blocks * SHA_DIGEST);
    std::uint8_t* digests = reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(out.ptr()));
    {
        py::gil_scoped_release unlocked;
        digest_chain(plain ? sha256_plain : sha256_fastest(), parent_view.data(), tokens_view.data(), block_tokens,
                     extras ? extra_bytes.data() : nullptr, blocks, digests);
    }
    return out;
}

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
    std::deque<Buffer> views;  // holds them until the copy is done
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

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "The compiled core of kvcache.";
    module.def("digest_chain", &py_digest_chain, py::arg("parent"), py::arg("tokens"), py::arg("block_tokens"),
               py::arg("extras") = py::none(), py::kw_only(), py::arg("plain") = false,
               R"(The 32-byte signatures of the full blocks of `tokens`, one behind the other.

signature[i] = SHA-256(signature[i - 1] + token ids of block i as little-endian uint32 + extras[i]); `parent`, 32 bytes,
stands before the first. `tokens` is a contiguous buffer of uint32, which must not change meanwhile; those behind the
last full block are left out. `extras` has one entry a full block. `plain` keeps to code that every processor runs. Lets
go of the interpreter lock. ValueError, TypeError or BufferError for anything else.)");
    auto def_copy = [&](const char* name, auto function, const char* doc) {
        module.def(name, function, py::arg("bases"), py::arg("extents"), py::arg("item_bytes"), py::arg("page_step"),
                   py::arg("page"), py::arg("payload"), py::arg("page_ids"), py::arg("payloads"), py::arg("threads"),
                   py::kw_only(), py::arg("plain") = false, doc);
    };
    def_copy("gather", &py_copy<Direction::Gather>, R"(Copy pages to payloads.

Axes are layer, K or V, token, head, element. `bases`, a buffer of uint64 by (layer, K or V), holds addresses of page 0;
`page` and `payload` are each axis's step in bytes (the first two of `page` go unread, `bases` says it). `page_ids` is a
buffer of int64; `payloads[i]` a contiguous buffer of the block's bytes. On as many as `threads` threads; `plain` keeps
to memcpy. Lets go of the interpreter lock. Addresses, steps and ids are taken on trust.)");
    def_copy("scatter", &py_copy<Direction::Scatter>,
             "Copy payloads to pages; arguments as for `gather`. No two of the pages may be the same.");
}
