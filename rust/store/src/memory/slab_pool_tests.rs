//! The memory of a slab pool: sharing, limits and reuse.

use super::*;
use crate::memory::slab::{Allocation, SlabRange, allocate};

const LIMIT: u64 = 8 << 20;

fn places(pool: &Arc<SlabPool>, sizes: &[u64]) -> Result<Vec<SlabRange>, StoreError> {
    let spaces = allocate(pool, sizes, None, &mut |_, _, _, _| Ok(()))?;
    Ok(spaces.into_iter().map(Allocation::into_range).collect())
}

#[test]
fn idle_memory_goes_back_to_the_system() {
    let pool = SlabPool::new("storage", LIMIT);
    drop(places(&pool, &[1 << 20]).unwrap());
    let idle = pool.memory_stats().idle_bytes;
    assert!(idle > 1 << 20);
    pool.trim();
    assert_eq!(pool.memory_stats().idle_bytes, idle, "it was in use just now");
    pool.trim();
    assert_eq!(pool.memory_stats().idle_bytes, 0);
}

#[test]
fn memory_of_one_large_step_is_freed_though_small_ones_follow() {
    let pool = SlabPool::new("storage", LIMIT);
    drop(places(&pool, &[1 << 20, 1 << 20, 1 << 20]).unwrap());
    pool.trim();
    for _ in 0..2 {
        for _ in 0..3 {
            drop(places(&pool, &[1 << 20]).unwrap());
        }
        pool.trim();
    }
    let idle = pool.memory_stats().idle_bytes;
    assert!(idle > 1 << 20 && idle < 2 << 20, "what the small ones use again stays: {idle}");
}

#[test]
fn small_ones_share_a_slab_and_large_ones_have_one_each() {
    let pool = SlabPool::new("storage", 1 << 30);
    let first = places(&pool, &[100, 3 << 20, 200, 300 << 10]).unwrap();
    let is_one = |a: &SlabRange, b: &SlabRange| Arc::ptr_eq(&a.slab, &b.slab);
    assert!(is_one(&first[0], &first[2]) && !is_one(&first[0], &first[1]) && !is_one(&first[1], &first[3]));
    assert_eq!((first[0].offset, first[2].offset % 64), (0, 0));
    // A later allocation goes into the space that is left.
    let later = places(&pool, &[50]).unwrap();
    assert!(is_one(&first[0], &later[0]) && later[0].offset >= first[2].offset + 200);
    // Many small ones take few slabs.
    let many = places(&pool, &vec![10_000; 20_000]).unwrap();
    let mut slabs: Vec<_> = many.iter().map(|place| Arc::as_ptr(&place.slab)).collect();
    slabs.dedup();
    assert!(slabs.len() < 12, "{}", slabs.len());
    assert!(pool.memory_stats().used_bytes < 20_000 * 10_048 + (20 << 20));
}

#[test]
fn tensors_of_one_slab_do_not_overlap() {
    let pool = SlabPool::new("storage", 1 << 30);
    let sizes: Vec<u64> = (1..600).map(|index| index * 97 % 5000 + 1).collect();
    let mut ranges: Vec<_> = places(&pool, &sizes)
        .unwrap()
        .iter()
        .zip(&sizes)
        .map(|(place, size)| {
            assert_eq!(place.len, *size);
            (place.start().addr(), place.start().addr() + place.len as usize)
        })
        .collect();
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
}

#[test]
fn a_limit_is_reached_to_the_page_by_fresh_memory_and_by_used() {
    let pool = SlabPool::new("storage", LIMIT);
    // Of what is kept, the larger ones are no better than fresh ones where each byte counts.
    drop(places(&pool, &[2_200_000]).unwrap());
    let all: Vec<_> = (0..4).map(|_| places(&pool, &[2_000_000]).unwrap()).collect();
    let memory = pool.memory_stats();
    assert!(memory.used_bytes + memory.idle_bytes <= LIMIT, "{memory:?}");
    assert!(matches!(places(&pool, &[2_000_000]), Err(StoreError::Full { .. })));
    drop(all);
    assert_eq!(pool.memory_stats().used_bytes, 0);
    assert!(pool.memory_stats().idle_bytes <= LIMIT);
}

#[test]
fn unusable_idle_memory_is_freed_before_fresh_memory_is_made() {
    let pool = SlabPool::new("storage", LIMIT);
    drop(places(&pool, &[3 << 20]).unwrap());
    let _larger = places(&pool, &[6 << 20]).unwrap();
    let most = pool.arena.stats().peak as u64;
    assert!(most <= LIMIT, "{most}");
}

#[test]
fn the_high_water_mark_is_the_most_that_was_ever_in_use() {
    let pool = SlabPool::new("storage", LIMIT);
    let used_and_highest = || (pool.memory_stats().used_bytes, pool.memory_stats().high_water_bytes);
    assert_eq!(used_and_highest(), (0, 0));
    let first = places(&pool, &[1 << 20]).unwrap();
    let (one, highest) = used_and_highest();
    assert!(one > 1 << 20 && highest == one);
    let second = places(&pool, &[1 << 20]).unwrap();
    assert_eq!(used_and_highest(), (2 * one, 2 * one));
    drop((first, second));
    assert_eq!(used_and_highest(), (0, 2 * one), "it stays");
    drop(places(&pool, &[1 << 20]).unwrap());
    assert_eq!(used_and_highest(), (0, 2 * one), "until more is in use");
}

#[test]
fn a_slab_that_is_larger_than_was_asked_for_counts_whole_in_the_high_water_mark() {
    let pool = SlabPool::new("storage", LIMIT);
    drop(places(&pool, &[2_200_000]).unwrap());
    let _other = places(&pool, &[1 << 20]).unwrap();
    let larger = pool.memory_stats().idle_bytes;
    let before = pool.memory_stats();
    let _reused = places(&pool, &[2_000_000]).unwrap();
    let after = pool.memory_stats();
    assert_eq!((after.idle_bytes, after.used_bytes), (0, before.used_bytes + larger), "the kept one was used again");
    assert_eq!(after.high_water_bytes, after.used_bytes);
}
