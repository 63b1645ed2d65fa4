"""The text of `calibrate="auto"`, written for this project: prose, a conversation, code, figures, some languages."""

__all__ = ["TEXT"]

TEXT = '''The harbour of the town lies behind a low wall of grey stone, and in winter the sea comes over it. People who
have lived there for long do not look up when a wave breaks; they know from the sound how far the water will run along
the street, and move their boxes of fish to the other side in good time. In 1887 a storm carried away the
wooden pier, two boats and the roof of the customs house. The new pier was built of iron, eleven metres longer than the
old one, and it is still in use. Every spring its bolts are counted, greased and, where rust has eaten them, replaced.

A measurement is more than a number. It has a unit, an instrument, a time and a person who took it, and it is worth
little without a statement of how wrong it may be. If ten people weigh the same stone on the same scale, they will write
down ten figures; the mean of these is better than any one of them, and their spread says by how much. When two groups
report different values for the same quantity, the first question is not who is right but whether the difference is
larger than what both of them admit. Often it is not. Where it is, somebody has overlooked a cause: the temperature of
the room, a worn spring, a clock that was set by hand.

User: Hi! I have 240 g of flour, two eggs and some milk at home. What could I cook for three people tonight?
Assistant: With that you can make pancakes. Whisk the eggs with about 400 ml of milk and a pinch of salt, add the flour
bit by bit until there are no lumps, and let the batter rest for twenty minutes. Then bake thin pancakes in a hot pan
with a little butter, about a minute and a half on each side. You should get nine or ten of them.
User: We have no butter. Is oil fine? And can I make them without salt?
Assistant: Yes to both. Use an oil without a strong taste, such as sunflower or rapeseed oil, and only a teaspoon for
each pancake. Without salt they taste a bit flat, so put something sweet or sour on top: apple sauce, lemon and sugar,
or jam. Would you like a filling that is not sweet?
User: Sure, what goes with mushrooms?
Assistant: Fry the mushrooms with an onion until the water is gone, season with pepper and thyme, and add two spoons of
cream or soft cheese. Fill the pancakes, roll them up and keep them warm in the oven at 80 degrees.

def moving_average(values, width):
    """Mean of the last `width` values at each position; shorter at the beginning."""
    assert width >= 1, f"width must be at least 1, not {width}"
    total, result = 0.0, []
    for i, value in enumerate(values):
        total += value
        if i >= width:
            total -= values[i - width]
        result.append(total / min(i + 1, width))
    return result


class Stack:
    def __init__(self, items=()):
        self._items = list(items)

    def push(self, item):
        self._items.append(item)

    def pop(self):
        if not self._items:
            raise LookupError("pop from an empty stack")
        return self._items.pop()

    def __len__(self):
        return len(self._items)

#include <stdio.h>

int main(int argc, char **argv) {
    long sum = 0;
    for (int i = 1; i < argc; i++) {
        sum += strtol(argv[i], NULL, 10);  /* anything else counts as 0 */
    }
    printf("%d arguments, sum %ld\\n", argc - 1, sum);
    return sum > 0 ? 0 : 1;
}

SELECT customers.name, COUNT(orders.id) AS num_orders, SUM(orders.total) AS revenue
FROM customers LEFT JOIN orders ON orders.customer_id = customers.id
WHERE orders.created_at >= '2021-01-01' GROUP BY customers.name HAVING COUNT(orders.id) > 3 ORDER BY revenue DESC;

{"name": "sensor-14", "interval": 30, "enabled": true, "tags": ["roof", "north"], "limits": {"low": -12.5, "high": 48}}

| city | inhabitants | area (km2) | founded |
|------|------------:|-----------:|--------:|
| Aldern | 48,210 | 73.4 | 1214 |
| Brakel | 152,977 | 188.0 | 1096 |
| Corvey | 9,035 | 21.7 | 1731 |

1. Switch the machine off and pull the plug.
2. Open the two screws at the back; keep the washers.
3. Lift the cover, first on the left side, then on the right.
4. Remove dust with a dry brush. Never use water or compressed air.
5. Put everything together in the opposite order and run the self-test (hold both buttons for five seconds).

Question: A train leaves at 14:35 and needs 2 hours and 50 minutes. When does it arrive if it is 12 minutes late?
Answer: 14:35 plus 2:50 is 17:25, and 12 minutes later it is 17:37.
Question: What is the square root of 1,764? Answer: 42, because 42 * 42 = 1764.
Question: Which of these is not a mammal: whale, bat, penguin, horse? Answer: The penguin, which is a bird.

Le marché ouvre à sept heures. On y trouve des légumes, du fromage et, le samedi, des livres d'occasion.
Der Zug nach Süden fährt heute von Gleis 4 ab; bitte beachten Sie die geänderte Wagenreihung.
El perro duerme junto a la puerta y solo se levanta cuando oye llegar el coche.
今日は天気がいいので、公園まで歩いて行きましょう。 Сегодня вечером будет дождь, возьми зонт.

Dear Ms. Lindqvist, thank you for your letter of 3 May. We have looked into the matter and found that the second invoice
(no. 20417, EUR 318.60) was indeed sent by mistake; please regard it as void. The amount that you paid on 28 April will
be returned to your account within ten working days. We apologise for the trouble and have asked our accounting
department to check all invoices of that week. If you have any further questions, call us on weekdays between 9 and 5.

The theory of evolution by natural selection rests on three observations. Individuals of a species differ from one
another; some of these differences are inherited; and more offspring are born than can survive. From these it follows
that traits which help an individual to survive and to reproduce become more common from one generation to the next. It
does not follow that species become better in any absolute sense. A trait that is an advantage in a cold climate may be
a burden in a warm one, and an island without predators will fill, sooner or later, with birds that have lost the power
of flight. In 1859 the mechanism of inheritance was unknown; the work of Mendel, published seven years later in a
journal of little circulation, was read by few and understood by fewer until the year 1900.

"You never told me," she said. "You never asked," he answered, and shut the window. For a while they listened to the
rain. Then she laughed, because it was so like him, and because the kettle had begun to sing in the kitchen, and there
was nothing more to be said about the house, or the money, or the long summer in which neither of them had written.

Traceback (most recent call last):
  File "/srv/app/worker.py", line 88, in run
    result = self.handlers[job.kind](job.payload)
KeyError: 'resize'
2023-11-05 08:14:59,201 WARNING queue: job 5512 failed (attempt 2 of 5), next attempt in 40 s
2023-11-05 08:15:02,774 INFO http: GET /api/v2/items?page=3 200 18ms

In music, an interval is the distance in pitch between two notes. The octave, with a ratio of frequencies of 2:1, sounds
like the same note again; the fifth (3:2) and the fourth (4:3) were held to be the purest after it. Twelve fifths make
almost, but not quite, seven octaves: (3/2)^12 = 129.746, whereas 2^7 = 128. Every way of tuning a piano is a decision
where to put the difference. In equal temperament each of the twelve semitones has the ratio 2^(1/12) = 1.05946, so all
keys are equally, and slightly, out of tune.

Summary of the meeting: (a) the budget for next year was approved with one vote against; (b) the roof will be repaired
in August, the offers of three companies are to be compared by the end of June; (c) the new printer is on the second
floor. Anna will write to the landlord. Next meeting: Tuesday, 14 March, 10:30, room 2.07.

To prove that there are infinitely many prime numbers, suppose that there are only finitely many, p1, p2, ..., pn. Let
N be their product plus one. N is larger than 1, so some prime divides it; but none of p1, ..., pn does, since each of
them leaves the remainder 1. Hence there is a prime which is not in the list, a contradiction. Note that N itself need
not be prime: 2 * 3 * 5 * 7 * 11 * 13 + 1 = 30031 = 59 * 509.

<html><body><h1>Opening hours</h1><ul><li>Mon-Fri: 8:00-18:00</li><li>Sat: 9:00-13:00</li></ul>
<p class="note">Closed on public holidays. <a href="https://example.org/contact">Contact us</a>.</p></body></html>
'''
