//! Leases in children made by `fork`. Alone in a process, since a child inherits the leases of all threads.
#![cfg(unix)]
#![allow(unsafe_code)]

use tundish_shm::arena::{Arena, ArenaPurpose};

#[test]
fn a_lease_that_a_child_inherited_lives_until_the_child_ends_or_lets_go() {
    for lets_go in [false, true] {
        let arena = Arena::new(ArenaPurpose::Arrays, 1 << 20);
        let mut segment = arena.take(1000, &mut || Ok(())).unwrap();
        segment.publish(1000, &[]).unwrap();
        let mut lease = Some(segment.lease().unwrap());
        let (mut told, mut tell) = ([0; 2], [0; 2]);
        // SAFETY: both are arrays of two.
        assert_eq!(unsafe { libc::pipe(told.as_mut_ptr()) + libc::pipe(tell.as_mut_ptr()) }, 0);
        // SAFETY: the child of a process with threads does nothing but system calls.
        let child = unsafe { libc::fork() };
        let mut byte = [0u8; 1];
        if child == 0 {
            if lets_go {
                drop(lease.take());
            }
            // SAFETY: one byte each way, and then the end; also where the parent ends without a word.
            unsafe {
                libc::close(told[1]);
                libc::write(tell[1], byte.as_ptr().cast(), 1);
                libc::read(told[0], byte.as_mut_ptr().cast(), 1);
                libc::_exit(0);
            }
        }
        drop(lease);
        // SAFETY: one byte.
        assert_eq!(unsafe { libc::read(tell[0], byte.as_mut_ptr().cast(), 1) }, 1);
        arena.give_back(segment);
        assert_eq!(arena.stats().escaped_bytes == 0, lets_go);
        let mut status = 0;
        // SAFETY: the child is this process's; the descriptors are its own.
        unsafe {
            libc::write(told[1], byte.as_ptr().cast(), 1);
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            told.into_iter().chain(tell).for_each(|descriptor| assert_eq!(libc::close(descriptor), 0));
        }
        assert_eq!(arena.stats().escaped_bytes, 0);
    }
}
