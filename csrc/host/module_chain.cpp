// Python binding of the digest chain.
#include "py_buffers.h"

#if PY_VERSION_HEX < 0x030B0000
#include <longintrepr.h>
#endif

#include <stdexcept>

namespace py = pybind11;

namespace kvcache {

ChainArgs::ChainArgs(const py::handle& parent, const py::handle& tokens, std::size_t block_tokens,
                     const py::handle& extras)
    : parent_(parent, PyBUF_SIMPLE),
      tokens_(tokens, PyBUF_FORMAT),
      block_tokens_(block_tokens),
      blocks_(0),
      has_extras_(!extras.is_none()) {
    expect(parent_.bytes() == SHA_DIGEST, "a parent of " + std::to_string(parent_.bytes()) + " bytes: expected 32");
    expect(block_tokens > 0, "block_tokens = 0: expected at least 1");
    const std::size_t ids = tokens_.holds("lq", 8)
                                ? tokens_.bytes() / 8
                                : tokens_.integers("IL", 4, "unsigned 32-bit integers, or signed 64-bit ones");
    blocks_ = ids / block_tokens;
    if (!has_extras_) return;
    for (const py::handle extra : extras) {
        const Buffer& view = held_.emplace_back(extra, PyBUF_SIMPLE);
        extras_.push_back({view.data(), view.bytes()});
    }
    expect(held_.size() == blocks_, std::to_string(held_.size()) + " extras: expected one for each of the " +
                                        std::to_string(blocks_) + " full blocks");
}

void ChainArgs::digest(bool plain, std::uint8_t* out) const {
    const TokenIds ids{tokens_.data(), tokens_.item_bytes() == 8};
    const std::size_t done = digest_chain(plain ? sha256_plain : sha256_fastest(), parent_.data(), ids, block_tokens_,
                                          has_extras_ ? extras_.data() : nullptr, blocks_, out);
    if (done < blocks_) throw std::overflow_error("a token id that does not fit into 32 bits without a sign");
}

namespace {

py::bytes py_digest_chain(const py::object& parent, const py::object& tokens, std::size_t block_tokens,
                          const py::object& extras, bool plain) {
    const ChainArgs input(parent, tokens, block_tokens, extras);
    py::bytes out(nullptr, input.blocks() * SHA_DIGEST);
    std::uint8_t* digests = reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(out.ptr()));
    {
        py::gil_scoped_release unlocked;
        input.digest(plain, digests);
    }
    return out;
}

py::bytes py_bind_signatures(const py::object& namespace_id, const py::object& signatures, bool plain) {
    const Buffer space(namespace_id, PyBUF_SIMPLE);
    const Buffer given(signatures, PyBUF_SIMPLE);
    expect(space.bytes() == SHA_DIGEST, "a namespace of " + std::to_string(space.bytes()) + " bytes: expected 32");
    expect(given.bytes() % SHA_DIGEST == 0,
           "signatures of " + std::to_string(given.bytes()) + " bytes: expected a multiple of 32");
    py::bytes out(nullptr, given.bytes());
    std::uint8_t* bound = reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(out.ptr()));
    {
        py::gil_scoped_release unlocked;
        bind_signatures(plain ? sha256_plain : sha256_fastest(), space.data(), given.data(), given.bytes() / SHA_DIGEST,
                        bound);
    }
    return out;
}

// The value of an exact Python int; more than 32 bits for anything that is no token id.
std::uint64_t token_id(PyObject* id) {
    constexpr std::uint64_t NONE = ~std::uint64_t{0};
    if (!PyLong_CheckExact(id)) return NONE;
#if PY_VERSION_HEX >= 0x030C0000
    const PyLongObject* number = reinterpret_cast<const PyLongObject*>(id);
    if (PyUnstable_Long_IsCompact(number)) return static_cast<std::uint64_t>(PyUnstable_Long_CompactValue(number));
#elif !defined(PYPY_VERSION)
    const Py_ssize_t digits = Py_SIZE(id);
    if (digits == 1) return reinterpret_cast<const PyLongObject*>(id)->ob_digit[0];
#endif
    const std::uint64_t value = PyLong_AsUnsignedLongLong(id);
    if (PyErr_Occurred()) PyErr_Clear();
    return value;
}

py::object py_token_ids(const py::object& ids) {
    const bool is_list = PyList_CheckExact(ids.ptr());
    if (!is_list && !PyTuple_CheckExact(ids.ptr())) return py::none();
    const Py_ssize_t count = is_list ? PyList_GET_SIZE(ids.ptr()) : PyTuple_GET_SIZE(ids.ptr());
    py::bytes out(nullptr, static_cast<std::size_t>(count) * 4);
    char* at = PyBytes_AS_STRING(out.ptr());
    std::uint64_t excess = 0;
    for (Py_ssize_t i = 0; i < count; ++i, at += 4) {
        const std::uint64_t id = token_id(is_list ? PyList_GET_ITEM(ids.ptr(), i) : PyTuple_GET_ITEM(ids.ptr(), i));
        excess |= id >> 32;
        const std::uint32_t narrow = static_cast<std::uint32_t>(id);
        std::memcpy(at, &narrow, sizeof narrow);
    }
    return excess ? py::object(py::none()) : py::object(out);
}

}  // namespace

void bind_chain(py::module_& module) {
    module.def("digest_chain", &py_digest_chain, py::arg("parent"), py::arg("tokens"), py::arg("block_tokens"),
               py::arg("extras") = py::none(), py::kw_only(), py::arg("plain") = false,
               R"(The 32-byte signatures of the full blocks of `tokens`, one behind the other.

signature[i] = SHA-256(signature[i - 1] + token ids of block i as little-endian uint32 + extras[i]); `parent`, 32 bytes,
is_listed before the first. `tokens` is a contiguous buffer of uint32 or int64, which must not change meanwhile; those
behind the last full block are left out. `extras` has one entry a full block. `plain` keeps to code that every processor
runs. Releases the interpreter lock. OverflowError where an int64 is no uint32; ValueError, TypeError or BufferError
for anything else.)");
    module.def("bind_signatures", &py_bind_signatures, py::arg("namespace_id"), py::arg("signatures"), py::kw_only(),
               py::arg("plain") = false,
               R"(SHA-256(namespace_id + signature) of each of these packed signatures, one behind the other.

`plain` keeps to code that every processor runs. Releases the interpreter lock. ValueError for other lengths.)");
    module.def("token_ids", &py_token_ids, py::arg("ids"),
               R"(A list or a tuple of ints as little-endian uint32, one behind the other.

None where it is neither or where something in it is not exactly an int of 32 bits without a sign.)");
}

}  // namespace kvcache
