//! A ray tracer: threads take the lines of an image of mirroring spheres, one after another.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Size of the image. Further lines begin it anew.
const WIDTH: usize = 128;
const HEIGHT: usize = 96;
/// Number of reflections of a ray.
const DEPTH: usize = 4;
/// Spheres in a row, and in a column.
const SPHERES: usize = 3;

type Vector = [f64; 3];

struct Sphere {
    centre: Vector,
    radius: f64,
}

/// Traces the first `lines` lines with `threads` threads. The result combines all lines, in whatever order
/// they were traced.
pub fn trace_lines(lines: usize, threads: usize) -> u64 {
    let next = AtomicUsize::new(0);
    let spheres = spheres();
    let trace = || {
        let mut image = 0_u64;
        loop {
            let line = next.fetch_add(1, Ordering::Relaxed);
            if line >= lines {
                return image;
            }
            image = image.wrapping_add(trace_line(&spheres, line % HEIGHT));
        }
    };
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(trace)).collect();
        let own = trace();
        let others = others.into_iter().filter_map(|thread| thread.join().ok());
        others.fold(own, u64::wrapping_add)
    })
}

fn spheres() -> Vec<Sphere> {
    let at = |index: usize| index as f64 - (SPHERES - 1) as f64 / 2.0;
    let each = (0..SPHERES * SPHERES).map(|index| Sphere {
        centre: [at(index % SPHERES), at(index / SPHERES), 4.0 + (index % 2) as f64],
        radius: 0.45,
    });
    each.collect()
}

/// Combination of the pixels of a line.
fn trace_line(spheres: &[Sphere], line: usize) -> u64 {
    let mut pixels = 0xcbf2_9ce4_8422_2325_u64;
    for column in 0..WIDTH {
        let direction = unit([
            (column as f64 - WIDTH as f64 / 2.0) / HEIGHT as f64 * 1.2,
            (line as f64 - HEIGHT as f64 / 2.0) / HEIGHT as f64 * 1.2,
            1.0,
        ]);
        let brightness = trace_ray(spheres, [0.0; 3], direction);
        let pixel = (brightness * 255.0) as u64;
        pixels = (pixels ^ pixel).wrapping_mul(0x100_0000_01b3);
    }
    pixels
}

/// Brightness of what a ray meets, from 0 to 1.
fn trace_ray(spheres: &[Sphere], mut origin: Vector, mut direction: Vector) -> f64 {
    let (mut brightness, mut weight) = (0.0, 1.0);
    for _ in 0..DEPTH {
        let hits = spheres.iter().filter_map(|sphere| {
            let distance = distance(sphere, origin, direction)?;
            Some((distance, sphere))
        });
        let Some((distance, sphere)) = hits.min_by(|one, other| one.0.total_cmp(&other.0)) else {
            // The sky.
            return brightness + weight * (0.5 + direction[1] / 2.0);
        };
        origin = add(origin, scale(direction, distance));
        let normal = scale(subtract(origin, sphere.centre), 1.0 / sphere.radius);
        let light = dot(normal, unit([-1.0, 1.0, -1.0])).max(0.0);
        brightness += weight * 0.5 * light;
        weight *= 0.5;
        direction = subtract(direction, scale(normal, 2.0 * dot(direction, normal)));
    }
    brightness
}

/// Distance to the nearest point of a sphere on a ray.
fn distance(sphere: &Sphere, origin: Vector, direction: Vector) -> Option<f64> {
    const NEAREST: f64 = 1e-6;
    let to_centre = subtract(sphere.centre, origin);
    let along = dot(to_centre, direction);
    let square = along * along - dot(to_centre, to_centre) + sphere.radius * sphere.radius;
    let half = (square >= 0.0).then(|| square.sqrt())?;
    [along - half, along + half]
        .into_iter()
        .find(|distance| *distance > NEAREST)
}

fn add(one: Vector, other: Vector) -> Vector {
    [one[0] + other[0], one[1] + other[1], one[2] + other[2]]
}

fn subtract(one: Vector, other: Vector) -> Vector {
    add(one, scale(other, -1.0))
}

fn scale(vector: Vector, by: f64) -> Vector {
    vector.map(|component| component * by)
}

fn dot(one: Vector, other: Vector) -> f64 {
    one[0] * other[0] + one[1] * other[1] + one[2] * other[2]
}

fn unit(vector: Vector) -> Vector {
    scale(vector, 1.0 / dot(vector, vector).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_is_the_same_with_any_number_of_threads() {
        let image = trace_lines(HEIGHT, 1);
        assert_ne!(image, 0);
        assert_eq!(trace_lines(HEIGHT, 3), image);
        assert_ne!(trace_lines(HEIGHT - 1, 1), image);
    }

    #[test]
    fn ray_meets_the_near_side_of_a_sphere() {
        let sphere = Sphere {
            centre: [0.0, 0.0, 4.0],
            radius: 1.0,
        };
        assert_eq!(distance(&sphere, [0.0; 3], [0.0, 0.0, 1.0]), Some(3.0));
        assert_eq!(distance(&sphere, [0.0, 0.0, 4.0], [0.0, 0.0, 1.0]), Some(1.0));
        assert_eq!(distance(&sphere, [0.0; 3], [0.0, 1.0, 0.0]), None);
        assert_eq!(distance(&sphere, [0.0; 3], [0.0, 0.0, -1.0]), None);
    }
}
