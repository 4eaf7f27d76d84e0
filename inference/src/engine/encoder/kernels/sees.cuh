// The keys of its own sequence that a query attends to: itself, up to `before` keys before it and `behind` behind it.

struct Sees {
    unsigned before, behind;

    static constexpr unsigned ALL = 0xffffffff;

    __device__ inline bool only_some() const {
        return before != ALL || behind != ALL;
    }

    __device__ inline bool key(unsigned query, unsigned key) const {
        return key > query ? key - query <= behind : query - key <= before;
    }

    // The first key.
    __device__ inline unsigned begin(unsigned query) const {
        return query > before ? query - before : 0;
    }

    // Behind the last of so many keys.
    __device__ inline unsigned end(unsigned query, unsigned keys) const {
        return behind < keys - query ? query + behind + 1 : keys;
    }
};
