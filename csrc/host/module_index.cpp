// Python binding of the block index.
#include <pybind11/stl.h>

#include <limits>
#include <memory>
#include <mutex>

#include "index.h"
#include "py_buffers.h"
#include "py_index_args.h"
#include "replay.h"

namespace py = pybind11;

namespace kvcache {
namespace {

constexpr std::size_t BRIEF_BLOCKS = 32;       // blocks
constexpr std::uint32_t PART_NODES = 1 << 12;  // nodes read under one lock by calls that read all

// A brief call keeps the interpreter lock, because getting it back can take a turn of every other thread. A thread with
// the interpreter lock never waits for the index.
template <class Call>
auto locked(const Index& index, std::size_t blocks, Call call) {
    if (blocks <= BRIEF_BLOCKS) {
        const std::unique_lock<std::mutex> lock(index.mutex, std::try_to_lock);
        if (lock) return call();
    }
    py::gil_scoped_release unlocked;
    const auto lock = index.fair_lock();  // released before the wait for the interpreter lock
    return call();
}

// The class kvcache._native.Index: an index that checks its arguments.
class PyIndex {
  public:
    PyIndex(unsigned tiers, std::vector<unsigned> bounds, std::vector<std::uint64_t> edges, double ghosts,
            std::vector<std::uint64_t> gaps)
        : tiers_(checked_tiers(tiers, bounds, edges, ghosts, gaps)), index_(tiers, bounds, edges, ghosts, gaps) {}

    std::uint64_t tick() {
        return locked(index_, 1, [&] { return index_.tick(); });
    }

    py::tuple match(const py::sequence& shard_keys, const std::vector<std::uint64_t>& needs,
                    const py::object& signatures) {
        const LookupArgs groups(shard_keys, needs);
        const Buffer view(signatures, PyBUF_SIMPLE);
        expect(view.bytes() % SIGNATURE == 0, "signatures of " + std::to_string(view.bytes()) + " bytes");
        ByTier by_tier;
        const std::size_t blocks = view.bytes() / SIGNATURE;
        const std::size_t found =
            locked(index_, blocks, [&] { return groups.match(index_, view.data(), blocks, &by_tier); });
        return py::make_tuple(found, tuple(by_tier));
    }

    py::tuple hash_and_match(const py::object& parent, const py::object& tokens, std::size_t block_tokens,
                             const py::object& extras, const py::sequence& shard_keys,
                             const std::vector<std::uint64_t>& needs) {
        const ChainArgs input(parent, tokens, block_tokens, extras);
        const LookupArgs groups(shard_keys, needs);
        py::bytes out(nullptr, input.blocks() * SIGNATURE);
        std::uint8_t* signatures = reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(out.ptr()));
        ByTier by_tier;
        std::size_t found;
        const auto look = [&] { return groups.match(index_, signatures, input.blocks(), &by_tier); };
        if (input.blocks() <= BRIEF_BLOCKS) {
            input.digest(false, signatures);
            found = locked(index_, input.blocks(), look);
        } else {
            py::gil_scoped_release unlocked;
            input.digest(false, signatures);
            const auto lock = index_.fair_lock();
            found = look();
        }
        return py::make_tuple(out, found, tuple(by_tier));
    }

    py::bytes tier_masks(const py::object& shard_key, const py::object& signatures) {
        const BlockRunArgs input(shard_key, signatures);
        py::bytes out(nullptr, input.blocks());
        std::uint8_t* masks = reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(out.ptr()));
        locked(index_, input.blocks(), [&] { index_.tier_masks(input.run(), masks); });
        return out;
    }

    std::uint64_t stamp(const py::object& shard_key, const py::object& signature) {
        const BlockRunArgs input(shard_key, signature);
        return locked(index_, 1, [&] { return index_.stamp(input.run()); });
    }

    void insert(const py::object& shard_key, const py::object& signatures, const py::object& parent, unsigned tier) {
        const BlockRunArgs input(shard_key, signatures);
        const Buffer before(parent, PyBUF_SIMPLE);
        expect(before.bytes() == SIGNATURE || before.bytes() == 0,
               "a parent of " + std::to_string(before.bytes()) + " bytes: expected 32, or none where it is unknown");
        check_tier(tier);
        const std::uint8_t* known = before.bytes() ? before.data() : nullptr;
        locked(index_, input.blocks(), [&] { index_.insert(input.run(), known, tier); });
    }

    void assign(const std::vector<std::string>& shard_keys, unsigned cost_class) {
        for (const std::string& shard_key : shard_keys) {
            expect(shard_key.size() == SHARD_KEY, "a shard key of " + std::to_string(shard_key.size()) + " bytes");
        }
        expect(cost_class < Index::MAX_COST_CLASSES, "kind " + std::to_string(cost_class) + ": expected less than " +
                                                         std::to_string(Index::MAX_COST_CLASSES));
        locked(index_, BRIEF_BLOCKS + 1, [&] { index_.assign(shard_keys, cost_class); });
    }

    std::vector<std::uint64_t> resident_by_class(unsigned tier) {
        check_tier(tier);
        return locked(index_, 1, [&] {
            std::vector<std::uint64_t> by_cost_class;
            for (unsigned cost_class = 0; cost_class < index_.cost_classes(); ++cost_class)
                by_cost_class.push_back(index_.resident(cost_class, tier));
            return by_cost_class;
        });
    }

    void refuse(const py::object& shard_key, const py::object& signatures) {
        const BlockRunArgs input(shard_key, signatures);
        locked(index_, input.blocks(), [&] { index_.refuse(input.run()); });
    }

    bool discard(const py::object& shard_key, const py::object& signature, unsigned tier, bool unless_held) {
        const BlockRunArgs input(shard_key, signature);
        check_tier(tier);
        return locked(index_, 1, [&] { return index_.discard(input.run(), tier, unless_held); });
    }

    void touch(const py::object& shard_key, const py::object& signatures, std::uint64_t stamp) {
        const BlockRunArgs input(shard_key, signatures);
        locked(index_, input.blocks(), [&] { index_.touch(input.run(), stamp); });
    }

    void restore_use(const py::object& shard_key, const py::object& signatures, std::uint64_t stamp, unsigned uses) {
        const BlockRunArgs input(shard_key, signatures);
        expect(uses < 256, std::to_string(uses) + " uses: expected a byte");
        locked(index_, input.blocks(), [&] { index_.restore_use(input.run(), stamp, uses); });
    }

    py::tuple hold(const py::object& shard_key, const py::object& signatures, const std::vector<std::uint64_t>& room) {
        const BlockRunArgs input(shard_key, signatures);
        expect(room.size() == tiers_,
               "room in " + std::to_string(room.size()) + " tiers: expected one each of " + std::to_string(tiers_));
        ByTier most{};
        std::copy(room.begin(), room.end(), most.begin());
        return tuple(locked(index_, input.blocks(), [&] { return index_.hold(input.run(), most); }));
    }

    void release(const py::object& shard_key, const py::object& signatures) {
        const BlockRunArgs input(shard_key, signatures);
        const bool sound = locked(index_, input.blocks(), [&] { return index_.release(input.run()); });
        expect(sound, "release of a block that is not held: give back what `hold` took, once");
    }

    py::list evict(unsigned tier, const py::object& values, std::size_t count, const py::object& before,
                   bool stored_below, const std::vector<double>& weights, double most) {
        check_tier(tier);
        const ValueTableArgs table(values, weights, index_);
        const std::uint64_t earlier = before.is_none() ? Index::NEVER : before.cast<std::uint64_t>();
        const auto victims = locked(index_, count, [&] {
            return index_.evict(tier, table.values(), weights, count, earlier, stored_below, most);
        });
        py::list out;
        for (const Index::Victim& victim : victims) {
            out.append(py::make_tuple(bytes(victim.shard_key, SHARD_KEY), bytes(victim.signature, SIGNATURE),
                                      bytes(victim.parent, victim.parent_known ? SIGNATURE : 0), victim.kept));
        }
        return out;
    }

    double worth(unsigned tier, const py::object& values, const py::object& records,
                 const std::vector<double>& weights) {
        check_tier(tier);
        const ValueTableArgs table(values, weights, index_);
        const Buffer rows(records, PyBUF_SIMPLE);
        const std::size_t count = rows.bytes() / (SHARD_KEY + SIGNATURE);
        expect(rows.bytes() == count * (SHARD_KEY + SIGNATURE),
               "records of " + std::to_string(rows.bytes()) + " bytes: expected a shard key and a signature each");
        return locked(index_, count, [&] { return index_.worth(tier, table.values(), weights, rows.data(), count); });
    }

    py::bytes names(unsigned tier) {
        check_tier(tier);
        return joined(gathered<std::uint8_t>([&](std::uint32_t first, std::uint32_t end, auto* part) {
            return index_.for_each_resident(tier, first, end,
                                            [&](const std::uint8_t* shard_key, const std::uint8_t* signature) {
                                                part->insert(part->end(), shard_key, shard_key + SHARD_KEY);
                                                part->insert(part->end(), signature, signature + SIGNATURE);
                                            });
        }));
    }

    py::bytes uses(const py::object& shard_key, const py::object& signatures) {
        const BlockRunArgs input(shard_key, signatures);
        py::bytes out(nullptr, input.blocks());
        std::uint8_t* uses = reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(out.ptr()));
        locked(index_, input.blocks(), [&] { index_.uses(input.run(), uses); });
        return out;
    }

    void replay(const py::object& shard_key, const py::object& starts, const py::object& blocks,
                const py::object& signatures, std::size_t first, std::size_t end, std::uint64_t capacity,
                const py::object& values, const py::object& hits, bool refuses) {
        const Buffer where(shard_key, PyBUF_SIMPLE), begins(starts, PyBUF_FORMAT), chain(blocks, PyBUF_FORMAT);
        const Buffer names(signatures, PyBUF_SIMPLE);
        const ValueTableArgs table(values, {}, index_);
        const Buffer out(hits, PyBUF_FORMAT | PyBUF_WRITABLE);
        expect(where.bytes() == SHARD_KEY && first <= end && out.integers("i", 4, "int32") >= end - first,
               "expected a shard key, and one hit for each request");
        check_requests(begins, chain, names.bytes() / SIGNATURE, first, end);
        expect(tiers_ == 1, "a trace is replayed on an index of one tier");
        expect(capacity >= index_.resident(0), "a capacity below the number of resident blocks");
        locked(index_, BRIEF_BLOCKS + 1, [&] {
            kvcache::replay(index_, where.data(),
                            {reinterpret_cast<const std::int64_t*>(begins.data()),
                             reinterpret_cast<const std::int32_t*>(chain.data()), names.data(), first, end},
                            capacity, table.values(), refuses, reinterpret_cast<std::int32_t*>(out.data()));
        });
    }

    py::bytes waiting() {
        std::vector<std::int64_t> counts(index_.classes() * index_.bins());
        locked(index_, 1, [&] { index_.waiting(counts.data()); });
        return bytes(counts.data(), counts.size() * sizeof counts[0]);
    }

    py::bytes reused() { return copied(index_.reused()); }
    py::bytes forgotten() { return copied(index_.forgotten()); }

    void learn(const py::object& reused, const py::object& forgotten) {
        const Buffer uses(reused, PyBUF_FORMAT), rest(forgotten, PyBUF_FORMAT);
        const std::size_t cells = index_.classes() * index_.bins();
        expect(uses.integers("lq", 8, "int64") == cells && rest.integers("lq", 8, "int64") == cells,
               "counts of (class, age bin) in another number");
        locked(index_, 1, [&] {
            index_.learn(reinterpret_cast<const std::int64_t*>(uses.data()),
                         reinterpret_cast<const std::int64_t*>(rest.data()));
        });
    }

    // Header (secret, clock), then rows: ghosts, the oldest first, then resident blocks.
    py::bytes export_state(std::size_t most) {
        auto here = gathered<std::uint64_t>([&](std::uint32_t first, std::uint32_t end, auto* part) {
            const bool more = index_.export_rows(first, end, most, part);
            most -= part->size();
            return more;
        });
        std::vector<std::uint64_t> head;
        GhostHistory::Span left;
        locked(index_, 1, [&] {
            head = index_.state_header();
            left = index_.newest(most);
        });
        auto rows = gathered<std::uint64_t>(
            [&](auto, auto, auto* part) { return index_.export_rows(&left, PART_NODES, part); });
        rows.insert(rows.begin(), std::move(head));
        rows.insert(rows.end(), here.begin(), here.end());
        return joined(std::move(rows));
    }

    void import_state(const py::object& state) {
        const Buffer view(state, PyBUF_SIMPLE);
        std::vector<std::uint64_t> words(view.bytes() / 8);
        expect(view.bytes() % 8 == 0 && words.size() >= 4, "nothing that an index told");
        std::copy_n(view.data(), view.bytes(), reinterpret_cast<std::uint8_t*>(words.data()));
        const bool sound = locked(index_, words.size(), [&] {
            return index_.import_rows({words[0], words[1], words[2]}, words[3], words.data() + 4, words.size() - 4);
        });
        expect(sound, "what another index told is no use to this one, or it is not new");
    }

    template <class Number>
    std::uint64_t number(Number number) {
        return locked(index_, 1, [&] { return static_cast<std::uint64_t>(number(index_)); });
    }

    std::uint64_t resident(unsigned tier) {
        check_tier(tier);
        return number([&](const Index& index) { return index.resident(tier); });
    }

    // Locks once for a copy of the nodes, then for a few thousand nodes at a time.
    std::vector<std::string> check() {
        std::vector<std::string> faults;
        {
            py::gil_scoped_release unlocked;
            NodePool room = index_.new_pool();
            auto lock = index_.fair_lock();
            const std::uint32_t node_count = index_.node_count();
            lock.unlock();
            room.prepare(node_count);
            lock = index_.fair_lock();
            const std::unique_ptr<const Index> snapshot = index_.snapshot(std::move(room));
            lock.unlock();
            faults = snapshot->audit();
        }
        by_parts([&](std::uint32_t first, std::uint32_t end) { return index_.check_table(first, end, &faults); });
        return faults;
    }

    static void bind(py::module_& module);

  private:
    static py::bytes bytes(const void* data, std::size_t length) {
        return py::bytes(static_cast<const char*>(data), length);
    }

    py::bytes copied(const std::vector<std::int64_t>& counts) {
        const auto copy = locked(index_, 1, [&] { return counts; });
        return bytes(copy.data(), copy.size() * sizeof copy[0]);
    }

    // Collects the parts that call(first, end, part) fills, so that no large buffer grows under the lock.
    template <class Item, class Call>
    std::vector<std::vector<Item>> gathered(Call call) {
        std::vector<std::vector<Item>> parts;
        by_parts([&](std::uint32_t first, std::uint32_t end) { return call(first, end, &parts.emplace_back()); });
        return parts;
    }

    // Calls call(first, end) over the node numbers, each time under the lock, until it returns false.
    template <class Call>
    void by_parts(Call call) {
        py::gil_scoped_release unlocked;
        for (std::uint32_t first = 0;; first += PART_NODES) {
            const auto lock = index_.fair_lock();
            if (!call(first, first + PART_NODES)) return;
        }
    }

    py::tuple tuple(const ByTier& by_tier) const {
        py::tuple out(tiers_);
        for (unsigned t = 0; t < tiers_; ++t) out[t] = by_tier[t];
        return out;
    }

    void check_tier(unsigned tier) const {
        expect(tier < tiers_, "tier " + std::to_string(tier) + ": there are " + std::to_string(tiers_));
    }

    const unsigned tiers_;
    Index index_;
};

void PyIndex::bind(py::module_& module) {
    py::class_<PyIndex>(module, "Index", R"(The block index; its twin, `ReferenceIndex`, defines each call.

A shard key is 42 bytes: namespace, group, shard; signatures are 32 bytes a block, packed. Releases the interpreter lock
for more than a few blocks. ValueError where arguments make no sense.)")
        .def(
            py::init<unsigned, std::vector<unsigned>, std::vector<std::uint64_t>, double, std::vector<std::uint64_t>>(),
            py::arg("tiers"), py::arg("bounds"), py::arg("edges"), py::arg("ghosts"),
            py::arg("gaps") = std::vector<std::uint64_t>())
        .def("tick", &PyIndex::tick)
        .def("match", &PyIndex::match, py::arg("shard_keys"), py::arg("needs"), py::arg("signatures"))
        .def("hash_and_match", &PyIndex::hash_and_match, py::arg("parent"), py::arg("tokens"), py::arg("block_tokens"),
             py::arg("extras"), py::arg("shard_keys"), py::arg("needs"),
             "`digest_chain` and `match` of its result in one call: (signatures, blocks, blocks by tier).")
        .def("tier_masks", &PyIndex::tier_masks, py::arg("shard_key"), py::arg("signatures"))
        .def("uses", &PyIndex::uses, py::arg("shard_key"), py::arg("signatures"))
        .def("replay", &PyIndex::replay, py::arg("shard_key"), py::arg("starts"), py::arg("blocks"),
             py::arg("signatures"), py::arg("first"), py::arg("end"), py::arg("capacity"), py::arg("values"),
             py::arg("hits"), py::arg("refuses") = true)
        .def("stamp", &PyIndex::stamp, py::arg("shard_key"), py::arg("signature"))
        .def("insert", &PyIndex::insert, py::arg("shard_key"), py::arg("signatures"), py::arg("parent"),
             py::arg("tier"))
        .def("refuse", &PyIndex::refuse, py::arg("shard_key"), py::arg("signatures"))
        .def("discard", &PyIndex::discard, py::arg("shard_key"), py::arg("signature"), py::arg("tier"),
             py::arg("unless_held"))
        .def("touch", &PyIndex::touch, py::arg("shard_key"), py::arg("signatures"), py::arg("stamp"))
        .def("restore_use", &PyIndex::restore_use, py::arg("shard_key"), py::arg("signatures"), py::arg("stamp"),
             py::arg("uses"))
        .def("hold", &PyIndex::hold, py::arg("shard_key"), py::arg("signatures"), py::arg("room"))
        .def("release", &PyIndex::release, py::arg("shard_key"), py::arg("signatures"))
        .def("evict", &PyIndex::evict, py::arg("tier"), py::arg("values"), py::arg("count"), py::arg("before"),
             py::arg("stored_below"), py::arg("weights") = std::vector<double>{},
             py::arg("most") = std::numeric_limits<double>::infinity())
        .def("worth", &PyIndex::worth, py::arg("tier"), py::arg("values"), py::arg("records"),
             py::arg("weights") = std::vector<double>{})
        .def("assign", &PyIndex::assign, py::arg("shard_keys"), py::arg("cost_class"))
        .def("resident_by_class", &PyIndex::resident_by_class, py::arg("tier"))
        .def("resident", &PyIndex::resident, py::arg("tier"))
        .def("names", &PyIndex::names, py::arg("tier"))
        .def("waiting", &PyIndex::waiting)
        .def("reused", &PyIndex::reused)
        .def("forgotten", &PyIndex::forgotten)
        .def("learn", &PyIndex::learn, py::arg("reused"), py::arg("forgotten"))
        .def("export_state", &PyIndex::export_state, py::arg("most"))
        .def("import_state", &PyIndex::import_state, py::arg("state"))
        .def("check", &PyIndex::check)
        .def("held", [](PyIndex& self) { return self.number([](const Index& i) { return i.held(); }); })
        .def("ghosts", [](PyIndex& self) { return self.number([](const Index& i) { return i.ghosts(); }); })
        .def("bytes", [](PyIndex& self) { return self.number([](const Index& i) { return i.bytes(); }); })
        .def("ghost_bytes", [](PyIndex& self) { return self.number([](const Index& i) { return i.ghost_bytes(); }); })
        .def("__len__", [](PyIndex& self) { return self.number([](const Index& i) { return i.size(); }); })
        .def_property_readonly("clock",
                               [](PyIndex& self) { return self.number([](const Index& i) { return i.clock(); }); });
}

}  // namespace

void bind_index(py::module_& module) { PyIndex::bind(module); }

}  // namespace kvcache
