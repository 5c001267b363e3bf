/// The positions of a sequence so far: one a token, which is its number, or three (time, height, width) where pictures lie on a canvas.
///
/// A token that follows has, in all rows, the greatest position before it plus one; without pictures that is its number. Going back
/// states a smaller length: positions of what stays do not change.
struct Positions {
    let rows: Int
    private var numTokens = 0
    /// Of every token, by row; empty where there is one row, since positions are numbers then.
    private var lines: [[Int]]
    /// The greatest of the tokens up to each, of any row.
    private var greatest: [Int] = []

    init(rows: Int) {
        self.rows = rows
        lines = rows == 1 ? [] : Array(repeating: [], count: rows)
    }

    /// The positions of so many tokens of text, or generated ones, after the sequence, by row.
    func next(_ count: Int) -> [[Int]] {
        let first = lines.isEmpty ? numTokens : (greatest.last ?? -1) + 1
        return Array(repeating: Array(first..<first + count), count: rows)
    }

    /// Tokens with these positions have run.
    mutating func append(_ next: [[Int]]) {
        numTokens += next[0].count
        if lines.isEmpty { return }
        for column in next[0].indices {
            var most = greatest.last ?? -1
            for row in lines.indices {
                lines[row].append(next[row][column])
                most = max(most, next[row][column])
            }
            greatest.append(most)
        }
    }

    mutating func rewind(to numTokens: Int) {
        self.numTokens = numTokens
        if lines.isEmpty { return }
        for row in lines.indices {
            lines[row].removeSubrange(numTokens...)
        }
        greatest.removeSubrange(numTokens...)
    }

    /// Whether token number `place` lies where a prompt has it; nil: where text has it.
    func isEqual(at place: Int, to prompt: [[Int]]?) -> Bool {
        lines.indices.allSatisfy { lines[$0][place] == prompt?[$0][place] ?? place }
    }
}
