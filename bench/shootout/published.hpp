// The published design, implemented from its description: a virtual reservation of the device's
// size per shape, bump allocation, 2 MiB handles shared by all shapes, every existing page mapped
// into every new space.

#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "driver.hpp"

namespace shootout {

class PublishedArena {
public:
    static constexpr std::size_t kPage = std::size_t{2} << 20;

    struct Space {
        CUdeviceptr base = 0;
        std::size_t mapped = 0;  // Mapped bytes, from the base.
        std::size_t cursor = 0;  // Offset of the next allocation.
    };

    explicit PublishedArena(int device) : reservation_(driver_.total_bytes() / kPage * kPage) {
        location_.type = CU_MEM_LOCATION_TYPE_DEVICE;
        location_.id = device;
    }
    PublishedArena(const PublishedArena&) = delete;
    PublishedArena& operator=(const PublishedArena&) = delete;
    ~PublishedArena() {
        for (const Space& space : spaces_) {
            if (space.mapped != 0)
                driver_.MemUnmap(space.base, space.mapped);
            driver_.MemAddressFree(space.base, reservation_);
        }
        for (const CUmemGenericAllocationHandle page : pages_)
            driver_.MemRelease(page);
    }

    // Opens a space with all existing pages. The pointer stays valid as long as the arena.
    Space* open() {
        Space space;
        call(driver_.MemAddressReserve(&space.base, reservation_, kPage, 0, 0),
             "cuMemAddressReserve");
        spaces_.push_back(space);
        Space* const opened = &spaces_.back();
        for (const CUmemGenericAllocationHandle page : pages_)
            map(*opened, page);
        access(*opened, 0);
        return opened;
    }

    // Allocates the next `bytes` of the space; null if out of memory. Nothing is ever freed.
    void* allocate(Space& space, std::size_t bytes) {
        const std::size_t end = space.cursor + (bytes + kPage - 1) / kPage * kPage;
        if (end > reservation_)
            return nullptr;
        const std::size_t had = space.mapped;
        while (space.mapped < end) {
            // A space maps the arena's pages in order, so missing pages are at the end.
            const std::size_t index = space.mapped / kPage;
            if (index == pages_.size() && !grow())
                break;
            map(space, pages_[index]);
        }
        if (space.mapped > had)
            access(space, had);
        if (space.mapped < end)
            return nullptr;
        void* const address = reinterpret_cast<void*>(space.base + space.cursor);
        space.cursor = end;
        return address;
    }

    [[nodiscard]] std::uint64_t physical_bytes() const { return pages_.size() * kPage; }
    [[nodiscard]] std::uint64_t calls() const { return calls_; }

private:
    bool grow() {
        CUmemAllocationProp properties{};
        properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = location_;
        CUmemGenericAllocationHandle page = 0;
        ++calls_;
        if (driver_.MemCreate(&page, kPage, &properties, 0) != CUDA_SUCCESS)
            return false;
        pages_.push_back(page);
        return true;
    }

    void map(Space& space, CUmemGenericAllocationHandle page) {
        call(driver_.MemMap(space.base + space.mapped, kPage, 0, page, 0), "cuMemMap");
        space.mapped += kPage;
    }

    void access(const Space& space, std::size_t from) {
        if (space.mapped == from)
            return;
        CUmemAccessDesc access{};
        access.location = location_;
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        call(driver_.MemSetAccess(space.base + from, space.mapped - from, &access, 1),
             "cuMemSetAccess");
    }

    void call(CUresult result, const char* what) {
        ++calls_;
        driver_.check(result, what);
    }

    const Driver& driver_ = Driver::get();
    std::size_t reservation_;
    CUmemLocation location_{};
    std::vector<CUmemGenericAllocationHandle> pages_;
    std::deque<Space> spaces_;
    std::uint64_t calls_ = 0;
};

}  // namespace shootout
